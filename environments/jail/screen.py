"""Rewrites a program so that all it does is counted, and refuses what could not be.

`rewrite` gives code in which function entries and iterations call `tick`, and calls, operators, comparisons, slices and
unpackings go through the functions of `guards`. Names that lead to the interpreter's inside are refused, as are parts of the
language that are not needed for an answer (async, metaclasses). Annotations are dropped. The kernel keeps a program in
(`layers`); this makes its result a function of the program alone, not of the machine's speed.
"""

from __future__ import annotations

import ast
from typing import Any

from . import library

#: Longest source, in characters.
SOURCE_CHARS_MAX = 65_536
#: Every name the rewriting uses begins like this; the source's own must not.
PREFIX = "_troth_"

_FORBIDDEN_NODES = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await, ast.TypeIgnore)
#: Special attributes that may be looked up; any may be defined as a method.
_SPECIAL_WORDS = (
    "__init__ __name__ __doc__ __len__ __iter__ __next__ __repr__ __str__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
    "__hash__ __contains__ __getitem__ __setitem__ __delitem__ __call__ __enter__ __exit__ __bool__ __post_init__"
)
_SPECIAL = frozenset(_SPECIAL_WORDS.split())
_SPECIAL_STORES = frozenset({"__slots__", "__hash__"})
#: Special functions that may be defined: what the interpreter calls on objects. `def __builtins__` would replace the guards.
_METHOD_WORDS = (
    "__new__ __del__ __post_init__ __bytes__ __format__ __missing__ __reversed__ __length_hint__ __getattr__ __getattribute__ "
    "__setattr__ __delattr__ __get__ __set__ __delete__ __set_name__ __init_subclass__ __class_getitem__ __neg__ __pos__ "
    "__abs__ __invert__ __complex__ __int__ __float__ __index__ __round__ __trunc__ __floor__ __ceil__ __copy__ __deepcopy__"
)
_OPERATOR_WORDS = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_METHODS = (
    (_SPECIAL - {"__name__", "__doc__"})
    | frozenset(_METHOD_WORDS.split())
    | frozenset(f"__{side}{word}__" for side in ("", "r", "i") for word in _OPERATOR_WORDS.split())
)
#: A method that sees every error, also the end of memory: rewritten where it is defined, and not to be put in place later.
METHODS_ONLY = frozenset({"__exit__"})
#: Types whose pattern may hold one other, which is matched with the whole value.
_MATCH_ITSELF = frozenset(
    ("bool", "bytearray", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
)
_INSIDE_WORDS = (
    "gi_frame gi_code gi_yieldfrom cr_frame cr_code cr_await ag_frame ag_code tb_frame tb_next f_back f_builtins "
    "f_code f_globals f_locals co_code func_globals func_code mro"
)
_INSIDE = frozenset(_INSIDE_WORDS.split())


class Screened(Exception):
    """The source uses what an answer may not use."""


def is_allowed_attribute(name: str) -> bool:
    """Whether an attribute may be looked up by this name."""
    special = name.startswith("__") and name.endswith("__")
    return not name.startswith(PREFIX) and name not in _INSIDE and (not special or name in _SPECIAL)


def rewrite(source: str) -> Any:
    """Code object of a source. Raises `Screened`, or what the compiler raises."""
    if len(source) > SOURCE_CHARS_MAX:
        raise Screened(f"the source has {len(source)} characters, limit {SOURCE_CHARS_MAX}")
    tree = _Rewriter().visit(ast.parse(source))
    return compile(ast.fix_missing_locations(tree), "<answer>", "exec", dont_inherit=True)


def _guard(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(f"{PREFIX}{name}_", ast.Load()), list(arguments), [])


def _tick() -> ast.stmt:
    return ast.Expr(_guard("tick"))


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, (str, bytes))


class _Rewriter(ast.NodeTransformer):
    """One pass; children are rewritten before their parents use them."""

    def __init__(self) -> None:
        self._temporaries = 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _FORBIDDEN_NODES):
            raise Screened(f"line {getattr(node, 'lineno', 0)}: {type(node).__name__} is not available")
        for field in ("name", "id", "arg", "rest"):
            self._check_name(getattr(node, field, None), node)
        for name in getattr(node, "names", ()) if isinstance(node, (ast.Global, ast.Nonlocal)) else ():
            self._check_name(name, node)
        for name in getattr(node, "kwd_attrs", ()):
            self._check_attribute(name, node)
        return super().visit(node)

    def _check_name(self, name: object, node: ast.AST) -> None:
        if not isinstance(name, str):
            return
        method = isinstance(node, ast.FunctionDef) and name in _METHODS
        special = name.startswith("__") and name.endswith("__") and not method
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and name in _SPECIAL_STORES
        if name.startswith(PREFIX) or (special and name != "__name__" and not stored and name != "__future__"):
            raise Screened(f"line {getattr(node, 'lineno', 0)}: the name {name} is not available")

    def _check_attribute(self, name: str, node: ast.AST) -> None:
        if not is_allowed_attribute(name):
            raise Screened(f"line {getattr(node, 'lineno', 0)}: the attribute {name} is not available")

    def _temporary(self) -> str:
        self._temporaries += 1
        return f"{PREFIX}t{self._temporaries}_"

    # Statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.name in METHODS_ONLY and node.decorator_list:
            raise Screened(f"line {node.lineno}: {node.name} takes no decorators")
        entry = [_tick()] + ([ast.Expr(_guard("caught"))] if node.name == "__exit__" else [])
        start = 0 if ast.get_docstring(node, clean=False) is None else 1
        node.body[start:start], node.returns = entry, None
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        node.body = ast.IfExp(_guard("tick"), node.body, ast.Constant(None))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if node.keywords:
            raise Screened(f"line {node.lineno}: a class takes no keywords")
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, _tick())
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, _tick())
        return node

    def _visit_try(self, node: Any) -> Any:
        self.generic_visit(node)
        for handler in node.handlers:
            handler.body.insert(0, ast.Expr(_guard("caught")))
        if node.finalbody:
            node.finalbody.insert(0, ast.Expr(_guard("caught")))
        return node

    visit_Try = visit_TryStar = _visit_try

    def visit_Match(self, node: ast.Match) -> ast.AST:
        self.generic_visit(node)
        node.subject = _guard("operand", node.subject)
        return node

    def visit_MatchClass(self, node: ast.MatchClass) -> ast.AST:
        """`case int(x)` becomes `case int() as x`: what stands by position would be looked up by the class's own names."""
        self.generic_visit(node)
        if not node.patterns:
            return node
        [inner, *more] = node.patterns
        itself = isinstance(node.cls, ast.Name) and node.cls.id in _MATCH_ITSELF
        if not itself or more or node.kwd_patterns or not isinstance(inner, ast.MatchAs) or inner.pattern is not None:
            raise Screened(f"line {node.lineno}: a class pattern takes keywords; a built-in type's also one name")
        plain = ast.copy_location(ast.MatchClass(node.cls, [], [], []), node)
        return ast.copy_location(ast.MatchAs(plain, inner.name), node) if inner.name else plain

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        starred = any(isinstance(part, ast.Starred) for target in node.targets for part in ast.walk(target))
        slices = any(isinstance(part, ast.Slice) for target in node.targets for part in ast.walk(target))
        if starred or slices:
            node.value = _guard("spread", node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        made: ast.AST = self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))
        return made

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """`a.b[c] += d` with each part evaluated once and in order."""
        before: list[ast.stmt] = []

        def hold(value: ast.expr) -> str:
            name = self._temporary()
            before.append(_assign(name, value))
            return name

        value, target = self.visit(node.value), node.target
        guard = f"i{type(node.op).__name__}"
        if isinstance(target, ast.Name):
            load: ast.expr = ast.Name(target.id, ast.Load())
            self._check_name(target.id, target)
        elif isinstance(target, ast.Attribute):
            self._check_attribute(target.attr, target)
            owner = hold(self.visit(target.value))
            load = ast.Attribute(ast.Name(owner, ast.Load()), target.attr, ast.Load())
            target = ast.Attribute(ast.Name(owner, ast.Load()), target.attr, ast.Store())
        elif isinstance(target.slice, ast.Slice):
            raise Screened(f"line {node.lineno}: an augmented assignment to a slice is not available")
        else:
            owner, index = hold(self.visit(target.value)), hold(_guard("operand", self.visit(target.slice)))
            load = ast.Subscript(ast.Name(owner, ast.Load()), ast.Name(index, ast.Load()), ast.Load())
            target = ast.Subscript(ast.Name(owner, ast.Load()), ast.Name(index, ast.Load()), ast.Store())
        return [*before, ast.copy_location(ast.Assign([target], _guard(guard, load, value)), node)]

    def visit_Import(self, node: ast.Import) -> Any:
        made = []
        for alias in node.names:
            self._check_name(alias.asname, node)
            if alias.name not in library.NAMES or ("." in alias.name and not alias.asname):
                raise Screened(f"line {node.lineno}: module {alias.name} is not available")
            made.append(_assign(alias.asname or alias.name, _guard("module", ast.Constant(alias.name))))
        return made

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.module == "__future__" and not node.level:
            return ast.copy_location(ast.Pass(), node)
        if node.level or node.module not in library.NAMES:
            raise Screened(f"line {node.lineno}: module {node.module} is not available")
        known = library.NAMES[node.module]
        pairs = [(name, name) for name in known] if node.names[0].name == "*" else []
        pairs = pairs or [(alias.name, alias.asname or alias.name) for alias in node.names]
        made: list[ast.stmt] = []
        for name, target in pairs:
            self._check_name(target, node)
            if name not in known:
                raise Screened(f"line {node.lineno}: {node.module}.{name} is not available")
            module = _guard("module", ast.Constant(node.module))
            made.append(_assign(target, ast.Attribute(module, name, ast.Load())))
        return made

    # Expressions

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self._check_attribute(node.attr, node)
        if node.attr in METHODS_ONLY and not isinstance(node.ctx, ast.Load):
            raise Screened(f"line {node.lineno}: {node.attr} can only be defined as a method")
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg is None:
                keyword.value = _guard("spread", keyword.value)
        if not (isinstance(node.func, ast.Name) and node.func.id == "super"):
            node.func = _guard("call", node.func)
        return node

    def visit_Starred(self, node: ast.Starred) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            node.value = _guard("spread", node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(_guard(type(node.op).__name__, node.left, node.right), node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            found: ast.expr = _guard("contains", node.left, node.comparators[0])
            return ast.UnaryOp(ast.Not(), found) if isinstance(node.ops[0], ast.NotIn) else found
        if any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
            raise Screened(f"line {node.lineno}: `in` within a chain of comparisons is not available")
        if not all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            node.left = node.left if _is_plain(node.left) else _guard("operand", node.left)
            node.comparators = [one if _is_plain(one) else _guard("operand", one) for one in node.comparators]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.slice, ast.Slice):
            if isinstance(node.ctx, ast.Load):
                return ast.copy_location(_guard("made", node), node)
            node.value = _guard("wide", node.value)
        else:
            if not _is_plain(node.slice):
                node.slice = _guard("operand", node.slice)
            if isinstance(node.ctx, ast.Del):
                node.value = _guard("wide", node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.copy_location(_guard("made", self._visit_parts(node)), node)

    def _visit_parts(self, node: ast.JoinedStr) -> ast.JoinedStr:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                part.value = _guard("operand", self.visit(part.value))
                if isinstance(part.format_spec, ast.JoinedStr):
                    part.format_spec = self._visit_parts(part.format_spec)
        return node

    def visit_Set(self, node: ast.Set) -> ast.AST:
        self.generic_visit(node)
        node.elts = [
            one if isinstance(one, ast.Starred) or _is_plain(one) else _guard("operand", one) for one in node.elts
        ]
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self.generic_visit(node)
        node.values = [
            _guard("spread", value) if key is None else value for key, value in zip(node.keys, node.values, strict=True)
        ]
        node.keys = [key if key is None or _is_plain(key) else _guard("operand", key) for key in node.keys]
        return node

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        node.elt = _guard("operand", node.elt)
        return node

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        self.generic_visit(node)
        node.key = _guard("operand", node.key)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        if node.is_async:
            raise Screened("async comprehensions are not available")
        self.generic_visit(node)
        node.ifs.insert(0, _guard("tick"))
        return node
