"""Reports the speed and the cache size of text generation, as text and as JSON. Torch-free."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agents.protocol import Value

if TYPE_CHECKING:
    from engine.sampling.generation import Generated


@dataclass(frozen=True)
class Report:
    """`cache_bytes`: the size of the caches of all ranks; `formula`: the size that the planner's formula gives for
    them."""

    done: "Generated"
    cache_bytes: int
    formula: int

    @property
    def facts(self) -> dict[str, Value]:
        done = self.done
        return {
            "prompt_tokens": done.prompt_tokens,
            "prefill_s": done.prefill_s,
            "prefill_tokens_per_s": done.prefill_rate,
            "decode_s": done.decode_s,
            "decode_tokens_per_s": done.decode_rate,
            "cache_bytes": self.cache_bytes,
            "cache_bytes_formula": self.formula,
        }

    def __str__(self) -> str:
        done = self.done
        rate = "·" if done.decode_rate is None else f"{done.decode_rate:,.1f} tokens/s"
        return (
            f"prefill {done.prompt_tokens} tokens in {done.prefill_s * 1e3:.1f} ms, {done.prefill_rate:,.0f} "
            f"tokens/s · decode {len(done.tokens[0])} tokens, {rate} · cache {self.cache_bytes:,} bytes on all ranks, "
            f"{self.formula:,} by formula"
        )
