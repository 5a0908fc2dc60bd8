"""How layer ids are counted: the same number names different states to different tools, and no file says which it means.

    target of 61 layers, states that enter layers 2, 30 and 58 (vLLM's defaults [2, n // 2, n - 3])

    vLLM, this kit, speculators 0.5 and newer       2, 30, 58    k: what enters layer k, 0 the embeddings
    speculators 0.3 and 0.4, TorchSpec              1, 29, 57    k: what leaves layer k
    SGLang                                          either       explicit ids are what leaves a layer; since sglang#25454
                                                                 only if the first is 1, else what enters one

Sources: speculators 0.3's custom_worker.py, vLLM's models/interfaces.py, sglang#25454.
"""

from collections.abc import Sequence

ENTERING = "k is what enters layer k, as vLLM counts"
LEAVING = "SGLang's explicit ids and speculators 0.3 count what leaves a layer"


def phrase(ids: Sequence[int]) -> str:
    """[2, 30, 58] -> "2, 30, 58 (k is what enters layer k, as vLLM counts; SGLang's explicit ids and speculators 0.3 count what
    leaves a layer: there the same states are 1, 29, 57)"; 0, the embeddings, has no number there."""
    named = ", ".join(map(str, ids))
    there = ", ".join(str(k - 1) if k else "none for 0" for k in ids)
    return f"{named} ({ENTERING}; {LEAVING}: there the same states are {there})"


def doubt(ids: Sequence[int], layers: int, own: bool) -> str:
    """What the layer ids of a draft's config suggest about how they were counted, "" if nothing: a suspicion, no proof.

    `layers` is the target's number of layers; `own` tells that speculators wrote the config. Only ids that follow from the
    usual defaults say anything: [1, n // 2 - 1, n - 4] are the defaults counted the other way, and [2, n // 2, n - 3] in a
    config that another trainer wrote may mean either, since old SGLang added one to them.
    """
    usual = [2, layers // 2, layers - 3]
    if list(ids) == [k - 1 for k in usual] or (ids and ids[0] == 1 and not own):
        return (f"these look like what leaves a layer; vLLM reads them as what enters one. If they were trained so, acceptance "
                f"is lost at every position: write {[k + 1 for k in ids]}")  # fmt: skip
    if list(ids) == usual and not own:
        return (f"the usual ids, written by another trainer: SGLang before sglang#25454 read them as {[k + 1 for k in ids]}. The "
                "files cannot tell; the samples it was trained on can (eagle3kit inspect SAMPLES --target), or a served trial of "
                "both")  # fmt: skip
    return ""
