"""From text to parameters: YAML files, the command line, a notebook's globals; and mistakes in plain words.

Three doors, one check. papermill itself only warns of an unknown parameter, and injects into the void when a notebook
has lost its `parameters` tag; `from_namespace` makes both an error inside the notebook, whoever started it.

`cls` is the class of parameters (`params.Params`), handed in by it.
"""

import ast
import difflib
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from eagle3kit import places
from eagle3kit.errors import KitError

FILE = "params_file"  # the one name in a parameters cell that is not a parameter


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice: plain YAML keeps the last and says nothing."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                line = key_node.start_mark.line + 1
                raise KitError(f"line {line}: {key!r} is given twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


# papermill reads dates as text; so do we, or one file would mean two things.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read(path: Path | str) -> dict[str, Any]:
    """The mapping in a YAML file, unchecked but for its shape."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        near = sorted(file.name for file in (places.root() / "params").glob("*.yaml"))
        raise KitError(f"cannot read {path}: {error.strerror}; files in params/: {', '.join(near) or 'none'}") from None
    except KitError as error:
        raise KitError(f"{path}, {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise KitError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise KitError(f"{path} holds a {type(data).__name__}, not `name: value` lines; see params/cpu.yaml")
    return data


def write(params: BaseModel) -> str:
    """Every value as YAML that reads back to the same parameters, here and in papermill."""
    return yaml.safe_dump(params.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load(cls, path: Path | str, overrides: dict[str, str]):
    """The parameters in a file, with overrides as typed on the command line. See `Params.load`."""
    data = read(path)
    check(cls, data, str(path))
    for name, text in overrides.items():
        data = merge(data, _nested(name, _typed(cls, name, text)))
    return check(cls, data, f"-p on top of {path}" if overrides else str(path))


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`, section by section."""
    merged = dict(base)
    for name, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], value) if both else value
    return merged


def check(cls, data: dict[str, Any], where: str):
    """Parameters from a mapping; KitError lists every mistake, one a line, each beginning with `where`."""
    # An empty section in a file (`training:` and nothing below) reads as null and means the defaults.
    data = {name: {} if value is None and name in cls.sections() else value for name, value in data.items()}
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise KitError("\n".join(f"{where}: {_plain(cls, mistake)}" for mistake in error.errors())) from None


def from_namespace(cls, namespace: dict[str, Any]):
    """The parameters in a notebook's globals. See `Params.from_namespace`.

    The parameters cell stands over the defaults; values that papermill injected, or that differ from the defaults,
    stand over `params_file`. Where papermill sent parameters, `params_file` counts only if it was sent too.
    """
    cells = [cell for cell in namespace.get("In", []) if isinstance(cell, str)]
    sent = _injected(cells)
    known = {*cls.__pydantic_fields__, FILE}
    for cell in cells:
        names = [name for name, _ in _assignments(cell)]
        if FILE in names:  # the parameters cell itself: a name written into it by hand may be wrong too
            for name in names:
                if name not in known:
                    raise KitError(f"parameters cell: {_unknown(cls, (name,))}")
    for name in sent:
        if name not in known:
            raise KitError(f"parameters: {_unknown(cls, (name,))}")
    missing = [name for name in known if name not in namespace]
    if missing:
        raise KitError(f"parameters: {min(missing)!r} is not set: run the cell tagged 'parameters' first")
    for name, value in sent.items():
        if namespace[name] != value:
            raise KitError(
                f"parameters: {name} was sent as {value!r} but is {namespace[name]!r}: is the 'parameters' tag missing "
                "from the cell that sets the defaults, or was that cell run again after the injected one?"
            )
    for name in cls.sections():
        if name not in sent and not isinstance(namespace[name], dict):
            raise KitError(
                f"parameters: {name} is a {type(namespace[name]).__name__}, not a section such as {{}}: "
                "a later cell has taken its name; run the parameters cell again"
            )
    here = {name: namespace[name] for name in cls.__pydantic_fields__}
    # The file named in the cell is for JupyterLab; what papermill sends comes from a file of its own.
    file = namespace[FILE] if not sent or FILE in sent else ""
    if not file:
        return check(cls, here, "parameters")
    if not isinstance(file, str):
        raise KitError(f'parameters: {FILE} is {file!r}: it must be text, such as "params/h200.yaml"')
    base = read(places.root() / file)
    check(cls, base, file)
    plain = cls().model_dump() | dict.fromkeys(cls.sections(), {})
    own = {name: value for name, value in here.items() if name in sent or value != plain[name]}
    return check(cls, merge(base, own), f"parameters over {file}")


def _injected(cells: list[str]) -> dict[str, Any]:
    """What papermill sent: its cell is the one that starts with `# Parameters`."""
    injected = next((cell for cell in reversed(cells) if cell.lstrip().startswith("# Parameters\n")), "")
    sent = {}
    for name, value in _assignments(injected):
        try:
            sent[name] = ast.literal_eval(value)
        except ValueError:  # papermill writes NaN and infinity as float('nan'): not a literal
            raise KitError(
                f"parameters: {name} was sent as {ast.unparse(value)}: NaN and infinity are not allowed; give a number"
            ) from None
    return sent


def _assignments(cell: str) -> Iterator[tuple[str, ast.expr]]:
    try:
        body = ast.parse(cell).body
    except SyntaxError:
        return
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _nested(name: str, value: Any) -> dict[str, Any]:
    head, dot, tail = name.partition(".")
    return {head: _nested(tail, value)} if dot else {head: value}


def _typed(cls, name: str, text: str) -> Any:
    """`text` as YAML would read it, except where the parameter is text: `-p run=007` is not the number 7."""
    section, _, leaf = name.rpartition(".")
    model = cls.sections().get(section, cls)
    field = model.__pydantic_fields__.get(leaf)
    if field is not None and field.annotation in (str, str | None):
        return None if text == "null" and field.annotation is not str else text
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError:
        raise KitError(f"-p {name}={text}: the value is not YAML; quote it, such as -p '{name}=[1, 2]'") from None


def _plain(cls, mistake: dict[str, Any]) -> str:
    """One pydantic error in our words: the parameter, its value, what is wrong, what it is for."""
    place, kind = mistake["loc"], mistake["type"]
    if kind == "extra_forbidden":
        return _unknown(cls, place)
    words = mistake["msg"].removeprefix("Value error, ")
    if not place:
        return words  # a check across fields: it names its own
    name = ".".join(str(part) for part in place)
    if kind in ("model_type", "model_attributes_type"):
        keys = ", ".join(cls.sections()[place[0]].__pydantic_fields__)
        return f"{name} is {mistake['input']!r}: a section is written {{key: value}}; its keys: {keys}"
    model = cls.sections().get(place[0], cls)
    field = model.__pydantic_fields__[place[1] if len(place) > 1 else place[0]]
    hint = "; put it in quotes" if kind == "string_type" and not isinstance(mistake["input"], (dict, list)) else ""
    words = words[0].lower() + words[1:]
    value = re.sub(r"://[^/@\s]+@", "://…@", repr(mistake["input"]))  # a password is not for logs
    return f"{name} is {value}: {words.removeprefix('input ')}{hint} ({field.description})"


def _unknown(cls, place: tuple) -> str:
    """An unknown name, and the nearest one that exists: beside it first, then anywhere."""
    wrong, section = str(place[-1]), ".".join(str(part) for part in place[:-1])
    beside = list(cls.sections()[section].__pydantic_fields__) if section else [*cls.__pydantic_fields__]
    leaves = [f"{name}.{leaf}" for name, model in cls.sections().items() for leaf in model.__pydantic_fields__]
    full = f"{section}.{wrong}" if section else wrong
    near = [f"{section}.{name}" if section else name for name in difflib.get_close_matches(wrong, beside, 1)]
    near = near or [leaf for leaf in leaves if leaf.partition(".")[2] == wrong]
    if not near and not section:
        names = difflib.get_close_matches(wrong, [leaf.partition(".")[2] for leaf in leaves], 1)
        near = [leaf for leaf in leaves if leaf.partition(".")[2] in names]
    if near:
        return f"unknown parameter {full!r}; did you mean {near[0]!r}?"
    return f"unknown parameter {full!r}; known{f' in {section}' if section else ''}: {', '.join(beside)}"
