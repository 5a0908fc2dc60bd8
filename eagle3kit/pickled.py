"""What a pickle of tensors describes, without running it: torch.save's own few instructions, and nothing else.

A pickle is a program: its instructions may name any function and call it. Here a name is only ever compared with a table:
tensors and storages become descriptions of themselves, dictionaries of the standard library become dictionaries, and every
other name is refused, named. Python's own unpickler, even with its hooks closed, takes memory as an instruction says (one
number reserves gigabytes); this one takes no more than the pickle's own length allows.

Source of the instructions: Python's pickletools; of the names: torch/_utils.py (`_rebuild_tensor_v2`, `_v3`,
`_rebuild_parameter`) and torch/serialization.py (`persistent_id` of `_save`).
"""

import struct
from typing import Any, NamedTuple

MOST_BYTES = 8 << 20  # a table of 262,144 token counts takes a third of it
MOST_DIMENSIONS = 8
MOST_STEPS = 2_000_000  # objects on the way, at some 64 bytes each
STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip
SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
DICTIONARIES = ("collections.OrderedDict", "collections.Counter")
SAME_ROOM = {"posix": "os", "nt": "os", "__builtin__": "builtins"}  # where a pickle's names are better known from


class Refused(Exception):
    """The pickle is not one of tensors; `wants` is what it would have run, or empty."""

    def __init__(self, said: str, wants: str = ""):
        super().__init__(said)
        self.wants = wants


class Storage(NamedTuple):
    """Bytes of the archive: record `data/KEY`, `numel` elements of `dtype` (of one byte for an untyped storage)."""

    dtype: str
    key: str
    numel: int


class Tensor(NamedTuple):
    """A view of a storage; offset and strides count elements of `dtype`."""

    dtype: str
    shape: tuple[int, ...]
    storage: Storage
    offset: int
    stride: tuple[int, ...]


class _Name(str):
    """A name from the table: a function or class that is described, never called."""


def describe(data: bytes) -> Any:
    """Dictionaries, lists, tuples, texts, numbers and `Tensor` descriptions, as the pickle `data` nests them.

    Raises:
        Refused: a name that is no tensor's (in `wants`), an instruction that torch.save does not write, a pickle that is
            cut short or out of proportion.
    """
    if len(data) > MOST_BYTES:
        raise Refused(f"its description of the content takes {len(data):,} bytes, more than {MOST_BYTES:,}")
    try:
        return _run(data)
    except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error, OverflowError) as error:
        raise Refused(f"its description of the content makes no sense ({type(error).__name__})") from None


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    push, position, end = stack.append, 0, len(data)
    for _ in range(MOST_STEPS):
        if position >= end:
            raise Refused("its description of the content is cut short")
        code = data[position]
        position += 1
        if code == 0x71:  # BINPUT
            memo[data[position]] = stack[-1]
            position += 1
        elif code == 0x68:  # BINGET
            push(memo[data[position]])
            position += 1
        elif code == 0x4B:  # BININT1
            push(data[position])
            position += 1
        elif code == 0x4D:  # BININT2
            push(data[position] | data[position + 1] << 8)
            position += 2
        elif code == 0x4A:  # BININT
            push(struct.unpack_from("<i", data, position)[0])
            position += 4
        elif code in (0x58, 0x8C):  # BINUNICODE, SHORT_BINUNICODE
            wide = 4 if code == 0x58 else 1
            length = int.from_bytes(_take(data, position, wide), "little")
            push(_take(data, position + wide, length).decode())
            position += wide + length
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code == 0x74:  # TUPLE
            start = marks.pop()
            stack[start:] = [tuple(stack[start:])]
        elif code in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            count = code - 0x84
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        elif code == 0x51:  # BINPERSID
            push(_storage(stack.pop()))
        elif code == 0x63:  # GLOBAL
            middle = data.index(b"\n", position)
            last = data.index(b"\n", middle + 1)
            push(_known(data[position:middle].decode(), data[middle + 1 : last].decode()))
            position = last + 1
        elif code == 0x93:  # STACK_GLOBAL
            name = stack.pop()
            push(_known(stack.pop(), name))
        elif code == 0x52:  # REDUCE
            arguments = stack.pop()
            push(_described(stack.pop(), arguments))
        elif code in (0x88, 0x89, 0x4E):  # NEWTRUE, NEWFALSE, NONE
            push({0x88: True, 0x89: False}.get(code))
        elif code == 0x29:  # EMPTY_TUPLE
            push(())
        elif code == 0x7D:  # EMPTY_DICT
            push({})
        elif code == 0x5D:  # EMPTY_LIST
            push([])
        elif code in (0x75, 0x73):  # SETITEMS, SETITEM
            start = marks.pop() if code == 0x75 else len(stack) - 2
            _set_items(stack[start - 1], stack[start:])
            del stack[start:]
        elif code in (0x65, 0x61):  # APPENDS, APPEND
            start = marks.pop() if code == 0x65 else len(stack) - 1
            if start < 1 or type(stack[start - 1]) is not list:
                raise TypeError
            stack[start - 1] += stack[start:]
            del stack[start:]
        elif code == 0x72:  # LONG_BINPUT
            memo[struct.unpack_from("<I", data, position)[0]] = stack[-1]
            position += 4
        elif code == 0x6A:  # LONG_BINGET
            push(memo[struct.unpack_from("<I", data, position)[0]])
            position += 4
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x8A:  # LONG1; 64 bits and a sign at most: larger numbers could be made to collide as keys
            length = data[position]
            if length > 9:
                raise ValueError
            push(int.from_bytes(_take(data, position + 1, length), "little", signed=True))
            position += 1 + length
        elif code == 0x47:  # BINFLOAT
            push(struct.unpack_from(">d", data, position)[0])
            position += 8
        elif code == 0x62:  # BUILD: what a dictionary carries beside its items (a module's versions) is of no use here
            stack.pop()
            if not isinstance(stack[-1], dict):
                raise TypeError
        elif code == 0x80:  # PROTO; torch writes 2
            if data[position] > 5:
                raise ValueError
            position += 1
        elif code == 0x95:  # FRAME
            position += 8
        elif code == 0x2E:  # STOP
            (content,) = stack
            return content
        else:
            raise Refused(f"its description of the content uses instruction 0x{code:02x}, which torch.save does not write")
    raise Refused(f"its description of the content takes more than {MOST_STEPS:,} steps")


def _take(data: bytes, position: int, length: int) -> bytes:
    if position + length > len(data):
        raise IndexError
    return data[position : position + length]


def _known(module: Any, name: Any) -> Any:
    """The table of names."""
    if type(module) is not str or type(name) is not str:
        raise TypeError
    whole = f"{module}.{name}"
    if whole.startswith("torch.") and whole.endswith("Storage") and (whole[6:-7] in STORAGES or name == "UntypedStorage"):
        return _Name(whole)
    if (module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")) or (
        whole in DICTIONARIES or whole == "torch.Size" or (module == "torch" and name in SIZES)
    ):
        return _Name(whole)
    wants = f"{SAME_ROOM.get(module, module)}.{name}"[:120]
    raise Refused(f"it wants to run {wants}", wants=wants)


def _storage(saved: Any) -> Storage:
    tag, kind, key, _, numel = saved
    if tag != "storage" or type(kind) is not _Name or type(key) is not str or type(numel) is not int or numel < 0:
        raise TypeError
    return Storage(STORAGES.get(kind.removeprefix("torch.").removesuffix("Storage"), "untyped"), key, numel)


def _described(what: Any, arguments: Any) -> Any:
    if type(what) is not _Name or type(arguments) is not tuple:
        raise TypeError
    if what == "torch._utils._rebuild_parameter":
        if type(arguments[0]) is not Tensor:
            raise TypeError
        return arguments[0]
    # Nothing is copied here: a pickle may name one large thing a million times.
    if what in DICTIONARIES:
        (made,) = arguments or ({},)
        if type(made) is not dict:
            raise TypeError
        return made
    if what == "torch.Size":
        (shape,) = arguments
        if type(shape) is not tuple:
            raise TypeError
        return shape
    if not what.startswith("torch._utils._rebuild_tensor"):
        raise TypeError
    storage, offset, shape, stride = arguments[:4]
    if type(storage) is not Storage or type(shape) is not tuple or type(stride) is not tuple:
        raise TypeError
    if len(shape) != len(stride) or len(shape) > MOST_DIMENSIONS:
        raise TypeError
    if any(type(n) is not int or n < 0 for n in (offset, *shape, *stride)):
        raise TypeError
    if what.endswith("_v3"):
        dtype = str(arguments[6]).removeprefix("torch.")
        if type(arguments[6]) is not _Name or dtype not in SIZES:
            raise TypeError
        return Tensor(dtype, shape, storage, offset, stride)
    if storage.dtype == "untyped":
        raise TypeError
    return Tensor(storage.dtype, shape, storage, offset, stride)


def _set_items(made: Any, row: list[Any]) -> None:
    if type(made) is not dict or len(row) % 2:
        raise TypeError
    for key, value in zip(row[::2], row[1::2], strict=True):
        if type(key) not in (str, int):  # others could be made to collide, which takes hours
            raise TypeError
        made[key] = value
