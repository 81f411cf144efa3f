"""Command-line flags made from a configuration Struct, so that a name, a bound and a default are written once.

A field `kv_memory` is the flag `--kv-memory`. Its help is the field's description with unit and default; a bool is
`--x/--no-x`, a tuple may be repeated, a Literal is a choice, a number of bytes may be written "1GiB".
Invariant: `configuration_from(S, parsed(arguments_of(c))) == c`, so a parent can hand its settings to a child.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import IO, Any, TypeVar

import click
import msgspec
from msgspec import inspect

from actors.configuration import parse_size

S = TypeVar("S", bound=msgspec.Struct)
Command = TypeVar("Command", bound=Callable[..., Any])


class WrongFlag(click.ClickException):
    """One line on stderr that names the flag; exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"Error: {self.format_message()}", file=file, err=file is None)


class Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def size_text(size: int) -> str:
    """The shortest exact way to write a number of bytes: 1073741824 is "1GiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


class Flag:
    """One field of a configuration Struct, as a flag."""

    def __init__(self, field: inspect.Field) -> None:
        self.name = field.name
        self.flag = flag_of(field.name)
        self.default = None if field.default is msgspec.NODEFAULT else field.default
        self.description, self.unit, self.env, self.hidden = "", "", None, False
        self._click_type: click.ParamType[Any] | type = str
        self.repeatable = self.boolean = False
        self._read(field.type)

    def _read(self, kind: inspect.Type) -> None:
        match kind:
            case inspect.Metadata():
                self._read(kind.type)
                extra = kind.extra or {}
                self.description = (kind.extra_json_schema or {}).get("description", self.description)
                self.unit = extra.get("unit", self.unit)
                self.env = extra.get("env", self.env)
                self.hidden = self.hidden or bool(extra.get("hidden"))
                if self.unit == "bytes":
                    self._click_type = Size()
            case inspect.UnionType():
                (other,) = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
                self._read(other)
            case inspect.VarTupleType():
                self._read(kind.item_type)
                self.repeatable = True
            case inspect.BoolType():
                self.boolean = True
            case inspect.IntType():
                self._click_type = int
            case inspect.FloatType():
                self._click_type = float
            case inspect.LiteralType():
                self._click_type = click.Choice([str(value) for value in kind.values])
            case inspect.StrType():
                self._click_type = str
            case _:
                raise TypeError(f"{self.name}: no flag can be made of {kind}")

    @property
    def help(self) -> str:
        notes = [self.unit] if self.unit else []
        if "default:" not in self.description:
            notes.append(f"default: {self._default_text()}")
        return f"{self.description} [{'; '.join(notes)}]" if notes else self.description

    def _default_text(self) -> str:
        if self.default is None or self.default == ():
            return "none"
        if self.boolean:
            return "on" if self.default else "off"
        return size_text(self.default) if self.unit == "bytes" else str(self.default)

    def option(self, command: Command) -> Command:
        if self.boolean:
            flag = f"{self.flag}/--no-{self.flag.removeprefix('--')}"
            return click.option(flag, self.name, default=self.default, help=self.help, hidden=self.hidden)(command)
        return click.option(
            self.flag,
            self.name,
            type=self._click_type,
            multiple=self.repeatable,
            default=self.default,
            envvar=self.env,
            help=self.help,
            hidden=self.hidden,
        )(command)

    def arguments(self, value: Any) -> list[str]:
        if self.boolean:
            return [self.flag if value else f"--no-{self.flag.removeprefix('--')}"]
        return [f"{self.flag}={each}" for each in (value if self.repeatable else [value])]


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def flags_of(struct: type[msgspec.Struct], skip: Collection[str] = ()) -> Iterator[Flag]:
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    return (Flag(field) for field in kind.fields if field.name not in skip)


def options_of(struct: type[msgspec.Struct], skip: Collection[str] = ()) -> Callable[[Command], Command]:
    """A decorator that gives a click command one option for each field, in the fields' order."""

    def decorate(command: Command) -> Command:
        for flag in reversed(list(flags_of(struct, skip))):
            command = flag.option(command)
        return command

    return decorate


def configuration_from(struct: type[S], values: Mapping[str, Any]) -> S:
    """The validated Struct out of what click parsed; other names in `values` are ignored. Raises WrongFlag."""
    names = struct.__struct_fields__
    try:
        return msgspec.convert({name: values[name] for name in names if name in values}, struct)
    except msgspec.ValidationError as error:
        raise WrongFlag(_naming_the_flag(str(error))) from None


def _naming_the_flag(text: str) -> str:
    """msgspec's "Expected `int` >= 1 - at `$.block_size`" as "--block-size: expected `int` >= 1"."""
    match = re.fullmatch(r"(.*) - at `\$\.(\w+)[^`]*`", text)
    return text if match is None else f"{flag_of(match[2])}: {match[1][0].lower()}{match[1][1:]}"


def arguments_of(configuration: msgspec.Struct, skip: Collection[str] = ()) -> list[str]:
    """The flags that make this configuration; those at their default are left out."""
    found: list[str] = []
    for flag in flags_of(type(configuration), skip):
        value = getattr(configuration, flag.name)
        if value != flag.default and value is not None:
            found += flag.arguments(value)
    return found
