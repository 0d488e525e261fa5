"""Train a Backpack that differs from model.py in one part, to learn what that part is for.

    python -m docs.dev.variants qk_norm config/train_english.py --out_dir=out/qk_norm
    python -m docs.dev.variants qk_norm --init_from=resume --out_dir=out/qk_norm
    python -m docs.dev.variants qk_norm eval gender --from out/qk_norm

After the variant, the flags are those of train.py or, after eval, of rucksack eval. Each
evaluation of a run also logs the scores before the softmax of Eq. 12. notes.md has the results.
"""

import math
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rucksack import checkpoint, train
from rucksack import run as run_folder
from rucksack.cli import run_cli
from rucksack.errors import UserError
from rucksack.model import Backpack, Config, mean_loss, split_heads, weighted_sum
from rucksack.paper import eval
from rucksack.training import stuck_senses

# -----------------------------------------------------------------------------
# The variants. Each starts from the parameters of a Backpack with the same seed.


class NormedQueriesAndKeys(nn.Linear):
    """Queries and keys (B, T, 2*d) with a root mean square of 1 per head, times a learned scale.

    So no score exceeds its sense's scale * sqrt(d/k): growing weights cannot saturate the softmax.
    """

    def __init__(self, linear: nn.Linear, n_sense: int, scale: float):
        super().__init__(linear.in_features, linear.out_features)
        self.load_state_dict(linear.state_dict())
        self.scale = nn.Parameter(torch.full((n_sense,), scale))

    def forward(self, h: Tensor) -> Tensor:
        heads = super().forward(h).unflatten(-1, (2, len(self.scale), -1))  # (B, T, 2, k, d/k)
        query, key = F.rms_norm(heads, heads.shape[-1:]).unbind(2)  # (B, T, k, d/k) each
        query = query * self.scale[:, None]
        return torch.stack([query, key], dim=2).flatten(2)  # (B, T, 2*d)


class NormedBackpack(Backpack):
    """A Backpack with QK-norm in SenseWeights; its scales start at 1."""

    SCALE = 1.0

    def __init__(self, config: Config):
        super().__init__(config)
        linear = self.sense_weights.c_attn
        self.sense_weights.c_attn = NormedQueriesAndKeys(linear, config.n_sense, self.SCALE)


class WideNormedBackpack(NormedBackpack):
    """A Backpack with QK-norm whose scales start at 4: with 16 dimensions, scores reach 16."""

    SCALE = 4.0


class WideBackpack(Backpack):
    """A Backpack whose scores start as wide as in WideNormedBackpack, but have no bound."""

    def __init__(self, config: Config):
        super().__init__(config)
        # h has a root mean square of 1, so queries and keys get a standard deviation of 2.
        self.sense_weights.c_attn.weight.data *= 100 / math.sqrt(config.n_embd)


class UniformWeights(nn.Module):
    """Weights alpha (B, k, T, T) that ignore the text: 1/(i + 1) for each token j <= i."""

    def __init__(self, n_sense: int):
        super().__init__()
        self.n_sense = n_sense

    def forward(self, h: Tensor) -> Tensor:
        B, T, _ = h.shape
        counts = torch.arange(1, T + 1, device=h.device)
        alpha = torch.ones(T, T, device=h.device).tril() / counts[:, None]  # (T, T)
        return alpha.expand(B, self.n_sense, T, T)


class UniformBackpack(Backpack):
    """A Backpack that averages senses over the tokens so far; it needs no contextualizer."""

    def __init__(self, config: Config):
        super().__init__(config, contextualizer=nn.Identity())
        self.sense_weights = UniformWeights(config.n_sense)


class TwoTableBackpack(Backpack):
    """A Backpack with a second table of embeddings, a copy of E at the start.

    Its forward calls senses and alpha, so a subclass can read the second table in either.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.second = nn.Embedding(config.vocab_size, config.n_embd)
        self.second.load_state_dict(self.wte.state_dict())

    def forward(self, idx: Tensor, targets: Tensor | None = None, *, C: Tensor | None = None,
                alpha: Tensor | None = None) -> Tensor:
        C = self.senses(idx) if C is None else C  # (B, T, k, d)
        alpha = self.alpha(idx) if alpha is None else alpha  # (B, k, T, T)
        logits = self.project(weighted_sum(alpha, C))  # (B, T, vocab_size)
        return logits if targets is None else mean_loss(logits, targets)


class OwnTableBackpack(TwoTableBackpack):
    """A Backpack whose sense network reads the second table; everything else shares E."""

    def senses(self, idx: Tensor) -> Tensor:
        return self.sense_network(self.second(idx))  # (.., k, d)


class UntiedBackpack(OwnTableBackpack):
    """A Backpack that reads the second table everywhere; only its output layer is E."""

    def alpha(self, idx: Tensor) -> Tensor:
        return self.sense_weights(self.contextualizer(self.second(idx)))  # (B, k, T, T)


VARIANTS = {
    'none': Backpack,  # unchanged, but with more columns in the log
    'qk_norm': NormedBackpack,
    'wide_qk_norm': WideNormedBackpack,
    'wide': WideBackpack,
    'uniform': UniformBackpack,
    'own_table': OwnTableBackpack,
    'untied': UntiedBackpack}

# -----------------------------------------------------------------------------
# The log, and the command line.

COLUMNS = ['widest_scores', 'largest_score']


@torch.no_grad()
def measure_scores(model: Backpack, idx: Tensor) -> dict[str, float]:
    """Measure the scores of texts idx (B, T) before the softmax, as columns of the log.

    The first is the largest standard deviation of a sense's scores, the second the largest size of
    any score. There are none if alpha is uniform.
    """
    if isinstance(model, UniformBackpack):
        return {}
    outputs = []
    hook = model.sense_weights.c_attn.register_forward_hook(lambda *call: outputs.append(call[-1]))
    model.alpha(idx)
    hook.remove()
    qk, = outputs  # (B, T, 2*d)
    query, key = split_heads(qk, 2, model.config.n_sense)  # (B, k, T, d/k) each
    scores = query @ key.mT / math.sqrt(query.shape[-1])  # (B, k, T, T)
    is_read = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()  # (T, T), j <= i
    scores = scores[..., is_read].float()  # (B, k, T * (T + 1) / 2), out of autocast's bfloat16
    widths = scores.transpose(0, 1).flatten(1).std(1)  # (k,)
    return {'widest_scores': widths.max().item(), 'largest_score': scores.abs().max().item()}


def measure(model: Backpack, idx: Tensor) -> dict[str, float]:
    """Count stuck senses and measure scores on the texts idx (B, T)."""
    return stuck_senses(model, idx) | measure_scores(model, idx)


def run(argv: list[str]) -> int | None:
    """Run train.py or rucksack eval with a variant in place of Backpack. Returns the exit code."""
    name, *flags = argv or ['']
    if name not in VARIANTS:
        raise UserError(f'{name!r} is not a variant; choose from {", ".join(VARIANTS)}')
    variant = patch.object(checkpoint, 'Backpack', VARIANTS[name])  # make_model uses this class
    gauge = patch.object(train, 'stuck_senses', measure)
    columns = patch.object(run_folder, 'COLUMNS', run_folder.COLUMNS + COLUMNS)
    with variant, gauge, columns:
        if flags[:1] == ['eval']:
            return eval.run(flags[1:])
        return train.run(flags)


if __name__ == '__main__':
    run_cli('variants.py', run)
