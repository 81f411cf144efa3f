"""`python -m tools.perplexity MODEL --text FILE`: how well a model expects a text, to compare ways of computing it.

Teacher-forced through the runner that also serves: the whole text is one request, computed chunk by chunk over the
paged pool, and every token's logits are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer

from actors.messages.errors import ConfigurationError
from actors.messages.plan import NewRequest, StepPlan
from actors.messages.request import SamplingParams
from runner.model_runner import ModelRunner
from runner.store.store import resolve

BLOCK_SIZE = 16
_CHUNK = 256  # tokens: their logits are some 50 MB


def num_blocks_for(num_tokens: int) -> int:
    return 1 + -(-num_tokens // BLOCK_SIZE)


def perplexity(runner: ModelRunner, token_ids: Sequence[int]) -> float:
    """e to the mean surprise of each token after the first. The pool has `num_blocks_for` them, for nobody else."""
    tokens = np.array(token_ids, np.int32)
    surprise = 0.0
    for start in range(0, len(tokens) - 1, _CHUNK):
        end = min(len(tokens) - 1, start + _CHUNK)
        logits = runner.score(plan_of(tokens, start, end))
        targets = logits.new_tensor(tokens[start + 1 : end + 1]).long()
        surprise += float((logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0]).double().sum())
    return math.exp(surprise / (len(tokens) - 1))


def plan_of(tokens: np.ndarray[tuple[int], np.dtype[np.int32]], start: int, end: int) -> StepPlan:
    """Computes tokens [start, end) of the one request."""
    blocks = np.arange(1, num_blocks_for(len(tokens)), dtype=np.int32) if start == 0 else np.empty(0, np.int32)
    new = (NewRequest("text", tokens.tobytes(), len(tokens), SamplingParams()),) if start == 0 else ()

    def column(value: int) -> bytes:
        return np.array([value], np.int32).tobytes()

    return StepPlan(
        step=0,
        request_ids=("text",),
        num_scheduled_tokens=column(end - start),
        num_computed_tokens=column(start),
        num_sampled=column(0),
        num_new_blocks=column(len(blocks)),
        new_block_ids=blocks.tobytes(),
        new_requests=new,
    )


@click.command()
@click.argument("model", default="smollm2-135m-instruct")
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--weights", default="dense", show_default=True, type=click.Choice(["dense", "stored"]))
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]))
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--threads", default=0, help="0: all cores.")
def main(model: str, text: Path, weights: str, dtype: str, device: str, threads: int) -> None:
    """The perplexity of a text file under MODEL, one line."""
    try:
        description = resolve(model)
        tokenizer = Tokenizer.from_file(f"{description.folder}/tokenizer.json")
        token_ids = tokenizer.encode(text.read_text()).ids[: description.context_length]
        if len(token_ids) < 2:
            raise ConfigurationError(f"{text} has fewer than two tokens")
        runner = ModelRunner(
            description,
            device=device,
            dtype=dtype,
            num_blocks=num_blocks_for(len(token_ids)),
            block_size=BLOCK_SIZE,
            threads=threads,
            weights=weights,
        )
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"perplexity {perplexity(runner, token_ids):.4f} over {len(token_ids)} tokens, {weights}, {dtype}")


if __name__ == "__main__":
    main()
