"""Is the Jupyter kernel `python3` the Python that runs us?

Notebooks run in the kernel named python3. A kernel of that name in the user's own folder can belong to another
environment, and a notebook would then train with another torch; better to stop before the first stage.
"""

import os
import subprocess
import sys
from pathlib import Path

from eagle3kit.errors import KitError


def check_kernel(name: str = "python3") -> None:
    """Return when the kernel exists and runs in this interpreter's environment; KitError says what to do if not."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    make = f"{sys.executable} -m ipykernel install --sys-prefix --name {name}"
    try:
        spec = KernelSpecManager().get_kernel_spec(name)
    except NoSuchKernel:
        raise KitError(f"there is no Jupyter kernel named {name}; make it: {make}") from None
    command = spec.argv[0]
    # A bare `python` means the interpreter that starts the kernel: ours.
    if os.path.basename(command) == command and command.startswith("python"):
        return
    where = Path(spec.resource_dir) / "kernel.json"
    way_out = f"delete the folder {where.parent} or correct it, then: {make}"
    try:
        ask = [command, "-c", "import sys; print(sys.prefix)"]
        prefix = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        raise KitError(f"the Jupyter kernel {name} ({where}) starts {command}, which does not run; {way_out}") from None
    if os.path.realpath(prefix) != os.path.realpath(sys.prefix):
        raise KitError(
            f"the Jupyter kernel {name} ({where}) belongs to another environment, {prefix}, not {sys.prefix}; {way_out}"
        )
