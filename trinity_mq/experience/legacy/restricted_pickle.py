"""Reads pickles without running what they say: a small machine for the opcodes and names that experiences need.

A pickle is a program. Here it may build None, booleans, numbers, text, bytes, lists, tuples and dicts, and beyond those
only what a literal table of names admits: the functions and classes of our own that stand in for those it asks for.

Python's own ``pickle.Unpickler`` with another ``find_class`` would not do: its BUILD sets attributes on whatever lies
on the stack, a memo number of four bytes makes it allocate 32 GiB, EXT opcodes bypass ``find_class``, and the hash of a
deeply nested tuple ends the process. Only ``pickletools`` is used, to tell opcodes apart.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.fields import short
from trinity_mq.experience.legacy.standins import Budget, Buildable, Function, Record, RecordType

HIGHEST_PROTOCOL = 5

_FREE_OBJECTS = 1 << 20
_BYTES_PER_OBJECT = 16
"""Containers and memo entries a pickle may make: these many, and one for each so many bytes of it."""

_KEYS = (str, int, float, type(None))
# fmt: off
_LITERALS = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
})
# fmt: on
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


Admitted = Mapping[tuple[str, str], Any]
"""What stands for a (module, name): a :class:`Function`, a :class:`RecordType`, or a value as it is."""


def load(
    file: io.BytesIO, size: int, admitted: Admitted, budget: Budget, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Return the value of the pickle that starts where ``file`` stands; ``file`` then stands after it.

    Args:
        file: What to read from.
        size: Bytes of the pickle, as far as known: how much it may build grows with it.
        admitted: All names that it may ask for.
        budget: Passed to the functions among them.
        persistent: What returns the object of a persistent id; None refuses all.

    Raises:
        DecodeError: It is malformed, or asks for what is not admitted.
    """
    machine = _Machine(size, admitted, budget, persistent)
    try:
        for opcode, argument, _ in pickletools.genops(file):
            machine.step(opcode.name, argument)
        return machine.pop()
    except DecodeError:
        raise
    except Exception as error:  # hostile bytes: whatever they set off, they are no pickle of ours
        raise DecodeError(f"the pickle is malformed before byte {file.tell()}: {short(str(error))}") from error


class _Machine:
    def __init__(self, size: int, admitted: Admitted, budget: Budget, persistent: Callable[[Any], Any] | None) -> None:
        self._admitted = admitted
        self._budget = budget
        self._persistent = persistent
        self._objects = _FREE_OBJECTS + size // _BYTES_PER_OBJECT
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self._stack.pop()

    def step(self, name: str, argument: Any) -> None:
        """Do one opcode."""
        if name in _LITERALS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        else:
            action = _ACTIONS.get(name)
            if action is None:
                raise DecodeError(
                    f"the pickle uses the opcode {name}, which pickles of experiences (protocols 2 to "
                    f"{HIGHEST_PROTOCOL}) do not"
                )
            action(self, argument)

    def protocol(self, argument: int) -> None:
        if argument > HIGHEST_PROTOCOL:
            raise DecodeError(f"a pickle of protocol {argument}, wanted 2 to {HIGHEST_PROTOCOL}")

    def mark(self, _: None) -> None:
        self._count()
        self._marked.append(self._stack)
        self._stack = []

    def tuple_of_marked(self, _: None) -> None:
        self._push(tuple(self._since_mark()))

    def tuple_of(self, count: int) -> None:
        self._push(tuple([self._stack.pop() for _ in range(count)][::-1]))

    def empty_list(self, _: None) -> None:
        self._push([])

    def empty_dict(self, _: None) -> None:
        self._push({})

    def byte_array(self, argument: bytearray) -> None:
        self._push(bytes(argument))

    def append(self, _: None) -> None:
        self._extend([self._stack.pop()])

    def appends(self, _: None) -> None:
        self._extend(self._since_mark())

    def set_item(self, _: None) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def set_items(self, _: None) -> None:
        self._update(self._since_mark())

    def put(self, argument: int) -> None:
        self._count()
        self._memo[argument] = self._stack[-1]

    def memoize(self, _: None) -> None:
        self.put(len(self._memo))

    def get(self, argument: int) -> None:
        if argument not in self._memo:
            raise ValueError(f"nothing is remembered as {argument}")
        self._stack.append(self._memo[argument])

    def global_in_text(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._look_up(module, name)

    def global_on_stack(self, _: None) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._look_up(module, name)

    def reduce(self, _: None) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(function) is not Function or type(arguments) is not tuple:
            raise DecodeError(f"the pickle calls {_what(function)} with {_what(arguments)}; it may not call that")
        self._push(function.call(self._budget, *arguments))

    def new_object(self, _: None) -> None:
        arguments, kind = self._stack.pop(), self._stack.pop()
        if type(kind) is not RecordType or arguments != ():
            raise DecodeError(f"the pickle makes an object of {_what(kind)}; it may not make one of that")
        self._push(Record(kind))

    def build(self, _: None) -> None:
        state = self._stack.pop()
        if not isinstance(self._stack[-1], Buildable):
            raise DecodeError(f"the pickle sets the state of {_what(self._stack[-1])}; it may not change that")
        self._stack[-1].build(state)

    def persistent_id(self, _: None) -> None:
        if self._persistent is None:
            raise DecodeError("the pickle refers to an object outside of it (a persistent id), wanted none")
        self._push(self._persistent(self._stack.pop()))

    def _look_up(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str or (module, name) not in self._admitted:
            raise DecodeError(
                f"the pickle asks for {short(module)} {short(name)}, which experiences do not need; nothing was run"
            )
        self._stack.append(self._admitted[module, name])

    def _push(self, value: Any) -> None:
        self._count()
        self._stack.append(value)

    def _count(self) -> None:
        self._objects -= 1
        if self._objects < 0:
            raise DecodeError("the pickle makes far more objects than its size lets expect")

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise DecodeError(f"the pickle appends to {_what(self._stack[-1])}, wanted a list")
        self._stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise DecodeError(
                f"the pickle puts {len(items)} keys and values into {_what(target)}, wanted pairs and a dict"
            )
        for key, value in zip(items[::2], items[1::2], strict=True):
            # nothing else has a hash that cannot be made to collide at will, or that costs more than a moment
            if not isinstance(key, _KEYS) or (isinstance(key, int) and not -(1 << 63) <= key < 1 << 64):
                raise DecodeError(f"a dict has the key {_what(key)}, wanted text or a number of at most 64 bits")
            target[key] = value


def _what(value: Any) -> str:
    """Return what kind of thing ``value`` is; never its content, which may contain itself."""
    return value.name if isinstance(value, RecordType) else f"a {type(value).__name__}"


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.protocol,
    "FRAME": lambda _, __: None,  # only helps a reader that buffers
    "STOP": lambda _, __: None,  # the last one
    "MARK": _Machine.mark,
    "TUPLE": _Machine.tuple_of_marked,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "EMPTY_LIST": _Machine.empty_list,
    "EMPTY_DICT": _Machine.empty_dict,
    "BYTEARRAY8": _Machine.byte_array,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.global_in_text,
    "STACK_GLOBAL": _Machine.global_on_stack,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.new_object,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent_id,
}
