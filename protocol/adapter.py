"""What training may change: whole weights, or a LoRA adapter on the base policy. The terms, their bounds, nothing else.

The adapted weight of a linear module is W + (alpha / rank) * B @ A, with A float32 [rank, in] and B float32 [out, rank].
How an adapter is laid out in a policy folder is the matter of `models.adapter`.
"""

from __future__ import annotations

import re

from protocol.codec import Message
from protocol.errors import ConfigError

RANK_MAX = 256
ALPHA_MAX = 4096
MODULES_MAX = 16
#: The last part of a module's path. It is compared, never used as a pattern.
_MODULE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)


class Adapter(Message, frozen=True):
    """The adapter of every policy after version 0.

    Attributes:
        rank: rank of every update; 0 means whole policies, and then `alpha` is 0 and `modules` is empty.
        alpha: numerator of the scale alpha / rank.
        modules: last names of the linear modules that are adapted, in every layer, ascending; for example
            ("q_proj", "v_proj").
    """

    rank: int
    alpha: int
    modules: tuple[str, ...]


#: Every policy of the task is a whole one.
WHOLE_POLICIES = Adapter(0, 0, ())


def validate_adapter(adapter: Adapter) -> None:
    """Check that an adapter is either none or one that can be built.

    Raises:
        ConfigError: naming the field, what was seen and what is expected.
    """
    rank, alpha, names = adapter.rank, adapter.alpha, adapter.modules
    if rank == 0:
        if adapter != WHOLE_POLICIES:
            raise ConfigError(
                f"adapter.rank is 0 (whole policies) but alpha is {alpha} and modules are {list(names)}: give a rank, "
                "or leave the others out"
            )
        return
    if not 1 <= rank <= RANK_MAX:
        raise ConfigError(f"adapter.rank is {rank}, expected 0 to {RANK_MAX}")
    if not 1 <= alpha <= ALPHA_MAX:
        raise ConfigError(f"adapter.alpha is {alpha}, expected 1 to {ALPHA_MAX}")
    if not 1 <= len(names) <= MODULES_MAX:
        raise ConfigError(f"adapter.modules has {len(names)} names, expected 1 to {MODULES_MAX}")
    for name in names:
        if not _MODULE_NAME.fullmatch(name):
            raise ConfigError(
                f"adapter.modules names {name[:80]!r}, expected the last name of a linear module, such as q_proj"
            )
    if names != tuple(sorted(set(names))):
        raise ConfigError(f"adapter.modules are {list(names)}, expected ascending names, each once")
