"""Translate Python functions that compute with numbers to JavaScript, so that a page of the site runs the library's own formulas.

Start from one function: what it calls, and the named tuples and constants it needs, come along. Both languages compute with the same 64-bit
floats, so results are equal to the last bit. Only what such functions use is understood; anything else raises TypeError.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["translated"]

_RUNTIME = """\
const $true = x => Array.isArray(x) ? x.length > 0 : Boolean(x)
const $or = (x, y) => $true(x) ? x : y()
const $and = (x, y) => $true(x) ? y() : x
const $items = x => Array.isArray(x) || x instanceof Set ? [...x] : Object.keys(x)
const $range = (low, high) => Array.from({length: Math.max(0, high - low)}, (_, i) => low + i)
const $sum = x => x.reduce((a, b) => a + Number(b), 0)
const $least = (x, key) => x.reduce((best, each) => key(each) < key(best) ? each : best)
const $round = x => { const low = Math.floor(x), rest = x - low; return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1 }
const $bitLength = x => 32 - Math.clz32(x)
const $frexp = x => {
  if (x === 0 || !Number.isFinite(x)) return [x, 0]
  let exponent = 0
  while (Math.abs(x) >= 1) { x /= 2; exponent++ }
  while (Math.abs(x) < 0.5) { x *= 2; exponent-- }
  return [x, exponent]
}
const $ldexp = (x, exponent) => {
  for (; exponent > 0; exponent--) x *= 2
  for (; exponent < 0; exponent++) x /= 2
  return x
}
class $Tuple { _replace(changes) { return Object.assign(Object.create(Object.getPrototypeOf(this)), this, changes) } }
"""

_OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%",
    ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
}  # fmt: skip
_COMPARISONS = {
    ast.Eq: "===", ast.NotEq: "!==", ast.Is: "===", ast.IsNot: "!==", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_MATHS = {"frexp": "$frexp", "ldexp": "$ldexp", "isnan": "Number.isNaN", "floor": "Math.floor", "ceil": "Math.ceil"}


def translated(*functions: Callable[..., Any]) -> str:
    """Return JavaScript that defines the functions and all that they need."""
    program = _Program()
    for function in functions:
        program.name_of(inspect.unwrap(function))
    return _RUNTIME + program.text()


class _Program:
    """The definitions of a translation, each made once."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # of objects, by their id
        self._objects: list[Any] = []  # which keeps the ids alive
        self._definitions: dict[str, str] = {}
        self._classes: dict[str, type] = {}
        self._methods: dict[str, dict[str, str]] = {}  # by class and name
        self._called: set[str] = set()  # names of methods that are called

    def text(self) -> str:
        """Return all definitions; methods that are called are translated until no more are found."""
        while any(self._translate_methods(name, kind) for name, kind in list(self._classes.items())):
            pass
        classes = [self._class_text(name, kind) for name, kind in self._classes.items()]
        return "\n".join([*classes, *self._definitions.values()]) + "\n"

    def name_of(self, value: Any) -> str:
        """Return an expression for a global object, which is defined first if it has not been."""
        if value is None or isinstance(value, bool | int | float | str):
            return json.dumps(value)
        value = inspect.unwrap(value) if callable(value) and not inspect.isclass(value) else value
        if id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"new {self.name_of(type(value))}({', '.join(map(self.name_of, value))})"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.name_of, value))}]"
        if isinstance(value, dict):
            return f"({{{', '.join(f'{json.dumps(str(key))}: {self.name_of(each)}' for key, each in value.items())}}})"
        kind = value if inspect.isclass(value) else type(value)
        name = getattr(value, "__name__", f"${kind.__name__}_object")
        if name in self._definitions or name in self._classes:
            raise TypeError(f"two objects are named {name}")
        self._names[id(value)] = name
        self._objects.append(value)
        if inspect.isclass(value):
            self._classes[name], self._methods[name] = value, {}
        elif inspect.isfunction(value):
            self._definitions[name] = ""  # its place, before those that it calls
            self._definitions[name] = f"function {self.function_text(value, name)}"
        else:
            self._definitions[name] = f"const {name} = new {self.name_of(kind)}()"
        return name

    def function_text(self, function: Callable[..., Any], name: str) -> str:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        return _Function(self, function.__globals__, tree).text(name)

    def parameters_of_method(self, name: str) -> list[str] | None:
        """Return the parameters of a method of some class of the program."""
        found = [vars(kind)[name] for kind in self._classes.values() if inspect.isfunction(vars(kind).get(name))]
        return list(inspect.signature(found[0]).parameters)[1:] if found else None

    def is_field(self, name: str) -> bool:
        return any(name in getattr(kind, "_fields", ()) for kind in self._classes.values())

    def call_method(self, name: str) -> None:
        self._called.add(name)

    def _translate_methods(self, name: str, kind: type) -> bool:
        new = [each for each in sorted(self._called) if inspect.isfunction(vars(kind).get(each)) and each not in self._methods[name]]
        for each in new:
            self._methods[name][each] = ""
            self._methods[name][each] = self.function_text(vars(kind)[each], each)
        return bool(new)

    def _class_text(self, name: str, kind: type) -> str:
        fields, defaults = getattr(kind, "_fields", ()), getattr(kind, "_field_defaults", {})
        given = ", ".join(f"{field} = {self.name_of(defaults[field])}" if field in defaults else field for field in fields)
        attributes = {key: value for key, value in vars(kind).items() if isinstance(value, int | float | str) and not key.startswith("__")}
        lines = [f"super(); Object.assign(this, {{{', '.join(fields)}}})" if fields else "super()"]
        lines += [f"this.{key} = {json.dumps(value)}" for key, value in attributes.items() if not fields]
        methods = "".join(f"\n{textwrap.indent(method, '  ')}" for method in self._methods[name].values())
        return f"class {name} extends $Tuple {{\n  constructor({given}) {{ {'; '.join(lines)} }}{methods}\n}}"


class _Function:
    """One function, with the names that it can see."""

    def __init__(self, program: _Program, seen: dict[str, Any], tree: ast.FunctionDef) -> None:
        self._program, self._seen, self._tree = program, seen, tree
        names = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
        self._is_method = bool(names) and names[0] == "self"
        self._parameters = names[1:] if self._is_method else names
        stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self._variables = sorted(stored - set(self._parameters))
        inner = {argument.arg for node in ast.walk(tree) if isinstance(node, ast.Lambda) for argument in node.args.args}
        self._local = {*names, *stored, *inner}

    def text(self, name: str) -> str:
        arguments = self._tree.args
        defaults: dict[str, ast.expr | None] = dict(zip(reversed(self._parameters), reversed(arguments.defaults)))
        if arguments.kwonlyargs:
            defaults = {argument.arg: value for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults)}
        given = [f"{each} = {self._expression(value)}" if (value := defaults.get(each)) else each for each in self._parameters]
        declared = [f"let {', '.join(self._variables)}"] if self._variables else []
        lines = "\n".join([*declared, *self._statements(self._tree.body)])
        return f"{name}({', '.join(given)}) {{\n{textwrap.indent(lines, '  ')}\n}}"

    def _statements(self, body: Iterable[ast.stmt]) -> list[str]:
        return [text for statement in body if (text := self._statement(statement))]

    def _block(self, body: Iterable[ast.stmt]) -> str:
        return "{\n" + textwrap.indent("\n".join(self._statements(body)), "  ") + "\n}"

    def _statement(self, node: ast.stmt) -> str:
        match node:
            case ast.Expr(value=ast.Constant()):  # a docstring
                return ""
            case ast.Assign(targets=[target], value=value):
                return f";{self._target(target)} = {self._expression(value)}"
            case ast.AnnAssign(target=target, value=value) if value is not None:
                return f";{self._target(target)} = {self._expression(value)}"
            case ast.AugAssign(target=target, op=op, value=value):
                return f";{self._target(target)} = {self._expression(ast.BinOp(target, op, value))}"
            case ast.Return(value=value):
                return "return" if value is None else f"return {self._expression(value)}"
            case ast.If(test=test, body=body, orelse=orelse):
                return f"if ({self._test(test)}) {self._block(body)}" + (f" else {self._block(orelse)}" if orelse else "")
            case ast.While(test=test, body=body, orelse=[]):
                return f"while ({self._test(test)}) {self._block(body)}"
            case ast.For(target=target, iter=iterated, body=body, orelse=[]):
                return f"for ({self._target(target)} of {self._items(iterated)}) {self._block(body)}"
        raise _unknown(node)

    def _target(self, node: ast.expr) -> str:
        if isinstance(node, ast.Tuple):
            return f"[{', '.join(map(self._target, node.elts))}]"
        return self._expression(node)

    def _items(self, node: ast.expr) -> str:
        """Return an array of the elements of an iterable."""
        if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.List | ast.Tuple):
            return self._expression(node)
        return f"$items({self._expression(node)})"

    def _test(self, node: ast.expr) -> str:
        text = self._expression(node)
        return (
            text if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)) else f"$true({text})"
        )

    def _expression(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=value):
                return json.dumps(value)
            case ast.Name(id=name):
                return self._name(name)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return f"[{', '.join(map(self._expression, elements))}]"
            case ast.Dict(keys=keys, values=values) if all(keys):
                pairs = [f"[{self._expression(key)}]: {self._expression(value)}" for key, value in zip(keys, values) if key]
                return f"({{{', '.join(pairs)}}})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"!{self._test(operand) if not isinstance(operand, ast.Compare) else f'({self._test(operand)})'}"
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{self._expression(operand)})"
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                return f"Math.floor({self._expression(left)} / {self._expression(right)})"
            case ast.BinOp(left=left, op=op, right=right):
                return f"({self._expression(left)} {_known(_OPERATORS, op)} {self._expression(right)})"
            case ast.BoolOp(op=op, values=[first, *rest]):
                text = self._expression(first)
                for value in rest:
                    text = f"{'$or' if isinstance(op, ast.Or) else '$and'}({text}, () => {self._expression(value)})"
                return text
            case ast.Compare():
                return self._comparison(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self._test(test)} ? {self._expression(body)} : {self._expression(orelse)})"
            case ast.Lambda(args=arguments, body=body):
                return f"(({', '.join(argument.arg for argument in arguments.args)}) => {self._expression(body)})"
            case ast.GeneratorExp(generators=[each]) | ast.ListComp(generators=[each]):
                return self._mapped(each, self._expression(node.elt))
            case ast.SetComp(elt=element, generators=[each]):
                return f"[...new Set({self._mapped(each, self._expression(element))})]"
            case ast.DictComp(key=key, value=value, generators=[each]):
                return f"Object.fromEntries({self._mapped(each, f'[{self._expression(key)}, {self._expression(value)}]')})"
            case ast.Subscript(value=value, slice=index):
                return f"{self._expression(value)}[{self._expression(index)}]"
            case ast.Attribute(value=value, attr=name):
                return self._attribute(value, name)
            case ast.Call():
                return self._call(node)
        raise _unknown(node)

    def _name(self, name: str) -> str:
        if name == "self" and self._is_method:
            return "this"
        if name in self._local:
            return name
        if name not in self._seen:
            raise TypeError(f"{name} is no global name, and no builtin that is understood")
        return self._program.name_of(self._seen[name])

    def _attribute(self, value: ast.expr, name: str) -> str:
        if isinstance(value, ast.Name) and value.id == "math":
            return {"nan": "NaN", "inf": "Infinity"}[name]
        text = self._expression(value)
        if name == "__getitem__":
            return f"(key => {text}[key])"
        if not self._program.is_field(name) and self._program.parameters_of_method(name) is not None:  # a bound method
            self._program.call_method(name)
            return f"((...given) => {text}.{name}(...given))"
        return f"{text}.{name}"

    def _comparison(self, node: ast.Compare) -> str:
        operands, parts = [node.left, *node.comparators], []
        for left, op, right in zip(operands, node.ops, operands[1:]):
            if isinstance(op, ast.In | ast.NotIn):
                parts.append(f"{'!' * isinstance(op, ast.NotIn)}{self._items(right)}.includes({self._expression(left)})")
            else:
                parts.append(f"{self._expression(left)} {_known(_COMPARISONS, op)} {self._expression(right)}")
        return f"({' && '.join(parts)})"

    def _mapped(self, each: ast.comprehension, result: str) -> str:
        target, items = self._target(each.target), self._items(each.iter)
        for condition in each.ifs:
            items = f"{items}.filter(({target}) => {self._test(condition)})"
        return f"{items}.map(({target}) => {result})"

    def _call(self, node: ast.Call) -> str:
        match node.func:
            case ast.Attribute(value=ast.Name(id="math"), attr=name):
                return f"{_MATHS[name]}({', '.join(map(self._expression, node.args))})"
            case ast.Attribute(value=value, attr="bit_length"):
                return f"$bitLength({self._expression(value)})"
            case ast.Attribute(value=value, attr="_replace"):
                changes = [f"{keyword.arg}: {self._expression(keyword.value)}" for keyword in node.keywords]
                return f"{self._expression(value)}._replace({{{', '.join(changes)}}})"
            case ast.Attribute(value=value, attr="values"):
                return f"Object.values({self._expression(value)})"
            case ast.Attribute(value=value, attr="items"):
                return f"Object.entries({self._expression(value)})"
            case ast.Attribute(value=value, attr="get"):
                return f"({self._expression(value)}[{self._expression(node.args[0])}] ?? null)"
            case ast.Attribute(value=value, attr=name):
                self._program.call_method(name)
                return f"{self._expression(value)}.{name}({self._arguments(node, self._program.parameters_of_method(name))})"
            case ast.Name(id=name) if name not in self._local and name not in self._seen:
                return self._builtin(name, node)
            case ast.Name(id=name) if name in self._local:
                return f"{name}({', '.join(map(self._expression, node.args))})"
            case ast.Name(id=name):
                called = self._seen[name]
                parameters = list(getattr(called, "_fields", None) or inspect.signature(inspect.unwrap(called)).parameters)
                new = "new " if inspect.isclass(called) else ""
                return f"{new}{self._name(name)}({self._arguments(node, parameters)})"
            case _:
                return f"{self._expression(node.func)}({', '.join(map(self._expression, node.args))})"

    def _arguments(self, node: ast.Call, parameters: list[str] | None) -> str:
        """Return the arguments of a call by position; those left out before a keyword are undefined, which means their default."""
        given = list(map(self._expression, node.args))
        keywords = {keyword.arg: self._expression(keyword.value) for keyword in node.keywords}
        if keywords:
            if parameters is None or not set(keywords) <= set(parameters):
                raise _unknown(node)
            for parameter in parameters[len(given) :]:
                given.append(keywords.get(parameter, "undefined"))
        return ", ".join(given)

    def _builtin(self, name: str, node: ast.Call) -> str:
        arguments = node.args
        if name in ("min", "max") and len(arguments) == 1:
            if node.keywords:
                return f"$least({self._items(arguments[0])}, {self._expression(node.keywords[0].value)})"
            return f"Math.{name}(...{self._items(arguments[0])})"
        given = list(map(self._expression, arguments))
        match name:
            case "min" | "max" | "abs":
                return f"Math.{name}({', '.join(given)})"
            case "int":
                return f"Math.trunc({given[0]})"
            case "float":
                return f"Number({given[0]})"
            case "round" if len(given) == 1:
                return f"$round({given[0]})"
            case "range" if len(given) < 3:
                return f"$range({given[0] if len(given) == 2 else 0}, {given[-1]})"
            case "reversed":
                return f"{self._items(arguments[0])}.slice().reverse()"
            case "sorted" if not node.keywords:
                return f"{self._items(arguments[0])}.slice().sort((a, b) => a - b)"
            case "sum" if len(given) == 1:
                return f"$sum({self._items(arguments[0])})"
            case "tuple" | "list":
                return self._items(arguments[0])
            case "next" if len(given) == 1:
                return f"{given[0]}[0]"
            case "len":
                return f"$items({given[0]}).length"
        raise _unknown(node)


def _known(symbols: dict[type, str], operator: ast.AST) -> str:
    if type(operator) not in symbols:
        raise _unknown(operator)
    return symbols[type(operator)]


def _unknown(node: ast.AST) -> TypeError:
    return TypeError(f"not understood: {ast.dump(node)[:300]}")
