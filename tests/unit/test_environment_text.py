"""Text environments: codecs round-trip, prompts are bounded by a rule, answers end where text ends, lengths are priced in whole
millionths; the reasoning-gym adapter on top of them."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import environments
from environments import files as environment_files
from environments.text import TEXT_FIELDS, LengthReward, TextEnvironment, extract_answer, read_options
from environments.tokenizer import SPLIT_PATTERNS, BytesCodec, TokenizerCodec
from protocol.errors import ConfigError, Fault
from protocol.task import Environment as EnvironmentSpec
from tests.support.tokenizer import make_tokenizer_json

TOKENIZER = make_tokenizer_json()
CODECS = {"bytes": BytesCodec(), "tokenizer": TokenizerCodec(TOKENIZER)}


def make(args, folders=()):
    text = json.dumps(args, sort_keys=True, separators=(",", ":"))
    spec = EnvironmentSpec("reasoning_gym", text, environments.content_hash("reasoning_gym", text))
    return environments.load(spec, folders)


def make_legs(**more):
    return make({"dataset": "leg_counting", "seed": 3, "size": 50, **more})


class Fixed:
    """Questions with a given text; grading compares with the question itself."""

    def __init__(self, *texts):
        self.texts = texts

    @property
    def num_questions(self):
        return len(self.texts)

    def question(self, index):
        return self.texts[index]

    def known_answer(self, index):
        return self.texts[index]

    def grade(self, index, answer):
        return 1_000_000 if answer == self.texts[index] else 0


def make_fixed(*texts, codec="bytes", **args):
    table = {name: args.get(name, field.default) for name, field in TEXT_FIELDS.items()}
    return TextEnvironment(Fixed(*texts), CODECS[codec], read_options("fixed", table))


@pytest.mark.parametrize("codec", CODECS)
@given(text=st.text())
def test_codecs_round_trip(codec, text):
    tokens = CODECS[codec].encode(text)
    assert all(0 <= token < CODECS[codec].vocab_size for token in tokens)
    clean = text.encode(errors="replace").decode()  # a lone surrogate has no bytes
    assert CODECS[codec].decode(tokens) == clean


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_any_token_sequence_decodes_to_the_text_before_its_end(codec, data):
    one = CODECS[codec]
    end = 256 if codec == "bytes" else one.encode("<|im_end|>")[0]
    tokens = data.draw(st.lists(st.integers(-2, one.vocab_size + 2)))
    text = one.decode(tokens)
    assert text.encode() is not None  # always text, never an error
    assert one.decode([*tokens, end, *tokens]) == text


@given(middle=st.text(), bound=st.integers(12, 60))
@pytest.mark.parametrize("codec", CODECS)
def test_a_long_question_loses_its_first_tokens_and_the_template_stays(codec, middle, bound):
    one = CODECS[codec]
    head, tail = ("<|im_start|>", "<|im_end|>") if codec == "tokenizer" else ("Q:", "\nA:")
    tokens = one.encode_between(head, middle, tail, bound)
    whole = one.encode(head + middle + tail)
    first, last = one.encode(head), one.encode(tail)
    assert len(tokens) == min(len(whole), bound)
    assert tokens[: len(first)] == first
    assert tokens[-len(last) :] == last
    kept = tokens[len(first) :]
    assert kept == whole[len(whole) - len(kept) :]


def test_special_tokens_of_a_template_are_tokens_and_end_an_answer():
    codec = CODECS["tokenizer"]
    environment = make_fixed("abc", codec="tokenizer", template="chatml")
    prompt = environment.prompt(0)
    start, end = codec.encode("<|im_start|>")[0], codec.encode("<|im_end|>")[0]
    assert prompt[0] == start
    assert [token for token in prompt if token in (start, end)] == [start, end, start]
    assert environment.reward(0, [*codec.encode(" abc\n"), end]) == 1_000_000
    assert environment.reward(0, [*codec.encode("abc"), end, *codec.encode("def"), end]) == 1_000_000
    assert environment.reward(0, [*codec.encode("abcd"), end]) == 0


@pytest.mark.parametrize(
    ("how", "text", "answer"),
    [
        ("exact", " 5\n", " 5\n"),
        ("text", " 5\n", "5"),
        ("first_line", "\n 5 \nso 6", "5"),
        ("last_line", "so\n 5 \n \n", "5"),
        ("last_line", "\n \n", ""),
        ("tag", "x <answer>4</answer> no: <answer> 5 </answer>.", "5"),
        ("tag", "<answer>5", ""),
        ("tag", "5", ""),
        ("tag", "<answer>4</answer><answer>", ""),
    ],
)
def test_the_part_of_a_completion_that_is_graded(how, text, answer):
    assert extract_answer(text, how) == answer


def test_the_last_questions_are_held_out():
    environment = make_fixed("a", "b", "c", held_out=1)
    assert environment.num_prompts == 2
    assert environment.held_out().num_prompts == 1
    assert bytes(environment.held_out().prompt(0)) == b"c"
    assert environment.held_out().reward(0, [ord("c"), 256]) == 1_000_000
    with pytest.raises(IndexError):
        environment.prompt(2)
    with pytest.raises(ConfigError, match="none is left"):
        make_fixed("a", held_out=1)
    with pytest.raises(ConfigError, match="keeps no questions back"):
        make_fixed("a").held_out()


def test_a_template_that_fills_the_prompt_is_refused():
    with pytest.raises(ConfigError, match="the template alone has 20 tokens"):
        make_fixed("a", template="x" * 20 + "{question}", prompt_tokens_max=20)


LENGTH = {"targets": [4, 10], "alpha_micro": 50_000}


def test_every_question_is_asked_once_for_every_target():
    environment = make_fixed("abc", "de", length=LENGTH, held_out=0)
    assert environment.num_prompts == 4
    prompts = [bytes(environment.prompt(index)).decode() for index in range(4)]
    assert prompts == [f"{text}\n\nAnswer in about {n} tokens." for text in ("abc", "de") for n in (4, 10)]
    assert environment.reward(0, [*b"abc", 256]) == 1_000_000
    assert environment.reward(1, [*b"abc", 256]) == 1_000_000 - 6 * 50_000
    assert environment.reward(1, [*b"abc      ", 256]) == 1_000_000
    assert environment.reward(0, [*b"xyz", 256]) == 0
    with pytest.raises(IndexError):
        environment.prompt(4)


@given(
    reward=st.integers(0, 1_000_000),
    alpha=st.integers(1, 1_000_000),
    target=st.integers(1, 65_536),
    tokens=st.integers(1, 100_000),
)
def test_length_rewards_are_whole_millionths_within_bounds_and_fall_with_distance(reward, alpha, target, tokens):
    length = LengthReward((target,), alpha, "{target}")
    found = length.apply(reward, target, tokens)
    assert type(found) is int
    assert 0 <= found <= reward
    assert length.apply(reward, target, target) == reward
    further = tokens + 1 if tokens >= target else tokens - 1
    assert length.apply(reward, target, further) <= found


def test_a_grade_that_is_no_reward_is_a_fault():
    environment = make_fixed("a")
    for grade in (-1, 1_000_001, 0.5, None, True):
        environment.questions.grade = lambda index, answer, grade=grade: grade
        with pytest.raises(Fault):
            environment.reward(0, [97, 256])


# ---- files by hash


def test_files_are_found_by_hash_in_the_folders_given(tmp_path):
    digest = hashlib.sha256(TOKENIZER).hexdigest()
    args = {"dataset": "leg_counting", "tokenizer": digest, "template": "smollm2"}
    text = json.dumps(args, sort_keys=True, separators=(",", ":"))
    spec = EnvironmentSpec("reasoning_gym", text, environments.content_hash("reasoning_gym", text))
    assert environments.needs_files(spec) == [digest]
    empty, full, decoy = tmp_path / "empty", tmp_path / "full", tmp_path / "decoy"
    for folder in (empty, full, decoy):
        folder.mkdir()
    (decoy / "tokenizer.json").write_bytes(TOKENIZER + b" ")
    (decoy / "tokenizer.txt").write_bytes(TOKENIZER)  # not a name of this kind
    with pytest.raises(ConfigError) as caught:
        environments.load(spec, [empty, decoy, tmp_path / "absent"])
    for part in (digest, "tokenizer", str(empty), str(decoy)):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="no folder at all"):
        environments.load(spec)
    (full / "any-name.json").write_bytes(TOKENIZER)
    environment = environments.load(spec, [empty, decoy, full])
    assert environment.vocab_size == CODECS["tokenizer"].vocab_size


def test_a_file_larger_than_its_kind_may_be_is_not_taken(tmp_path):
    kind = environment_files.Kind("tokenizer", ".json", 3)
    (tmp_path / "a.json").write_bytes(b"1234")
    (tmp_path / "b.json").write_bytes(b"123")
    (tmp_path / "c.json").mkdir()
    assert environment_files.find_files({hashlib.sha256(b"123").hexdigest(): kind}, [tmp_path])
    with pytest.raises(ConfigError):
        environment_files.find_files({hashlib.sha256(b"1234").hexdigest(): kind}, [tmp_path])


def edit(path, value):
    table = json.loads(TOKENIZER)
    here = table
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    return json.dumps(table).encode()


GROW = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}


def chain(key, part, count):
    return {"type": "Sequence", key: [part] * count}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "model.type"),
        (b'{"model":{"type":"BPE"}}', "cannot be read"),
        (edit(["model", "type"], "Unigram"), "model.type"),
        (edit(["model", "dropout"], 0.1), "random"),
        (edit(["model", "vocab"], {"a": 2**40}), "cannot be read"),
        (edit(["model", "merges"], [["nobody", "home"]]), "cannot be read"),
        (edit(["normalizer"], {"type": "BertNormalizer"}), "normalizer"),
        (edit(["normalizer"], {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 17}), "content"),
        (edit(["normalizer"], {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}), "pattern"),
        (
            edit(["pre_tokenizer"], {"type": "Split", "pattern": {"Regex": "(a|a)*$"}, "behavior": "Isolated"}),
            "pattern",
        ),
        (
            edit(["pre_tokenizer"], {"type": "Sequence", "pretokenizers": [{"type": "BertPreTokenizer"}]}),
            "pre_tokenizer",
        ),
        (edit(["decoder"], "ByteLevel"), "no table"),
        (edit(["normalizer"], {"type": "Sequence", "normalizers": 5}), "expected a list"),
        (edit(["normalizer"], {"type": ["NFC"]}), "expected one of"),
        (edit(["normalizer"], chain("normalizers", GROW, 2)), "256 times as long"),
        (edit(["decoder"], chain("decoders", GROW, 12)), "times as long"),
        (edit(["normalizer"], {"type": "Replace", "pattern": {"String": ""}, "content": "b" * 16}), "17 times as long"),
        (edit(["pre_tokenizer"], chain("pretokenizers", {"type": "ByteLevel"}, 3)), "64 times as long"),
        (edit(["normalizer"], chain("normalizers", {"type": "NFC"}, 40)), "33 parts"),
    ],
)
def test_a_tokenizer_that_is_not_known_to_be_deterministic_and_bounded_is_refused(data, says):
    with pytest.raises(ConfigError, match=says):
        TokenizerCodec(data)


@pytest.mark.parametrize("name", SPLIT_PATTERNS)
@given(text=st.text(max_size=50))
def test_known_split_patterns_round_trip(name, text):
    data = edit(
        ["pre_tokenizer"],
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT_PATTERNS[name]}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
    )
    codec = TokenizerCodec(data)
    assert codec.decode(codec.encode(text)) == text.encode(errors="replace").decode()


# ---- reasoning-gym


def test_reasoning_gym_rewards_the_answer_and_bounds_prompts():
    environment = make_legs()
    answer = environment.known_answer(2)
    assert environment.reward(2, (*answer.encode(), 256)) == 1_000_000
    assert environment.reward(2, (*answer.encode(), 256, 65)) == 1_000_000
    assert environment.reward(2, (*b"banana", 256)) < 1_000_000
    assert environment.reward(2, (255, 254, 256)) < 1_000_000  # bytes that are no text are an answer like any other
    assert environment.vocab_size == 257
    assert max(environment.prompt(2)) < 256
    short = make_legs(prompt_tokens_max=16)
    assert short.prompt(2) == environment.prompt(2)[-16:]
    with pytest.raises(IndexError):
        environment.prompt(50)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "raise"])
def test_a_grader_that_fails_gives_no_reward(score):
    environment = make_legs()

    class Broken:
        def __getitem__(self, index):
            return {"question": "?", "answer": "!"}

        def score_answer(self, answer, entry):
            if score == "raise":
                raise TimeoutError("grader")
            return score

    environment.questions.dataset = Broken()
    with pytest.raises(Fault):
        environment.reward(1, (65, 256))


@pytest.mark.parametrize(("score", "micro"), [(2.0, 1_000_000), (-1.0, 0), (0.25, 250_000), (True, 1_000_000)])
def test_scores_are_clipped_to_millionths(score, micro):
    environment = make_legs()
    environment.questions.dataset = type(
        "Set", (), {"__getitem__": lambda s, i: {"question": "?"}, "score_answer": lambda s, a, e: score}
    )()
    assert environment.reward(1, (65, 256)) == micro
