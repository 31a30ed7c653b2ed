"""Compares the CPU time of attention with a document mask and of causal attention without one: forward and backward
pass of one attention operation, on one thread."""

import time
from collections.abc import Callable
from statistics import median

ROUNDS = 9
SIZES = [(128, 4, 4, 16), (512, 2, 8, 64), (2048, 1, 8, 64)]  # tokens, sequences, heads, width of a head


def main() -> None:
    import torch
    from torch import Tensor

    from engine.kernels.document_attention import Positions, added_to_scores, attention
    from engine.kernels.flash_attention import causal_attention

    torch.set_num_threads(1)
    print("tokens  causal ms  masked ms  ratio  mask ms")

    def spent(run: Callable[[], Tensor], backward: bool = True) -> float:
        start = time.process_time()
        out = run()
        if backward:
            out.sum().backward()  # type: ignore[no-untyped-call]
        return 1000 * (time.process_time() - start)

    for S, B, H, C in SIZES:
        q, k, v = (torch.randn(B, H, S, C, requires_grad=True) for _ in range(3))
        at = torch.arange(S)
        positions = Positions(at, at, (at // 64 * 64).expand(B, S))
        mask = added_to_scores(positions, q.dtype)
        times = [
            (
                spent(lambda q=q, k=k, v=v: causal_attention(q, k, v)),
                spent(lambda q=q, k=k, v=v, mask=mask: attention(q, k, v, mask)),
                spent(lambda positions=positions, q=q: added_to_scores(positions, q.dtype), backward=False),
            )
            for _ in range(ROUNDS)
        ]
        causal, masked, made = (median(column) for column in zip(*times, strict=True))
        ratio = median(masked / causal for causal, masked, _ in times)
        print(f"{S:6}  {causal:9.2f}  {masked:9.2f}  {ratio:5.2f}  {made:7.2f}", flush=True)
