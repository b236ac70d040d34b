"""Says at the end how much was compared with the reference library."""

from tests.toploc.kit import counts


def pytest_terminal_summary(terminalreporter):
    if counts:
        terminalreporter.write_line(
            "compared with the reference: {completions} completions, {chunks} chunks ({tied} with ties), "
            "{verified} verifications of other activations".format_map({"verified": 0, "tied": 0, **counts})
        )
