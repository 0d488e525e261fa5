"""Claims about rucksack/optimizers.py: which optimizer moves which parameters, and how far."""

import pytest
import torch
from helpers import lively
from torch import nn

from rucksack.model import Backpack, Config
from rucksack.optimizers import make_optimizers
from rucksack.train import Settings

EMBEDDINGS = ('wte.weight', 'wpe.weight')


@pytest.mark.parametrize('decay_embeddings', [True, False])
def test_adamw_decays_matrices_and_embeddings_if_asked(decay_embeddings):
    """AdamW decays matrices, never biases and norms, and embeddings if decay_embeddings says so."""
    model = lively(n_sense=3)
    adamw, = make_optimizers(model, Settings(optimizer='adamw', decay_embeddings=decay_embeddings))
    decays = {}
    for group in adamw.param_groups:
        decays |= dict.fromkeys(group['params'], group['weight_decay'])
    for name, p in model.named_parameters():
        is_decayed = p.dim() == 2
        if name.endswith(EMBEDDINGS):
            is_decayed = decay_embeddings
        assert decays[p] == (0.1 if is_decayed else 0.0), name


@pytest.mark.parametrize('n_sense', [0, 3])
def test_muon_takes_all_matrices_but_the_embeddings(n_sense):
    """In both models, Muon gets every matrix but the embeddings, and AdamW gets the rest."""
    model = lively(n_sense=n_sense)
    _, muon = make_optimizers(model, Settings())
    moved = {p for group in muon.param_groups for p in group['params']}
    for name, p in model.named_parameters():
        is_for_muon = p.dim() == 2 and not name.endswith(EMBEDDINGS)
        assert (p in moved) == is_for_muon, name


@pytest.mark.parametrize('name, n_parts', [
    ('sense_network.final_mlp.c_proj', 3), ('contextualizer.blocks.0.attn.c_attn', 3),
    ('sense_weights.c_attn', 2)])
def test_muon_moves_each_part_of_a_stack_by_itself(name, n_parts):
    """Queries, keys, values and each sense move as torch's Muon moves separate matrices."""
    model = lively(n_sense=3)
    n_embd = model.config.n_embd
    weight = model.get_submodule(name).weight
    _, muon = make_optimizers(model, Settings(muon_lr=0.02))
    parts = [nn.Parameter(part.clone()) for part in weight.detach().split(n_embd)]
    alone = torch.optim.Muon(parts, lr=0.02, weight_decay=0.1, adjust_lr_fn='match_rms_adamw')
    for _ in range(3):  # the first step has no momentum yet
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for part, grad in zip(parts, weight.grad.split(n_embd)):
            part.grad = grad.clone()
        muon.step()
        alone.step()
    assert len(parts) == n_parts
    rounding = 0.02 * 0.2 * n_embd ** 0.5 * 0.08  # torch's Muon works in bfloat16
    assert torch.allclose(weight, torch.cat(parts), rtol=0, atol=rounding)


@pytest.mark.parametrize('name', ['adamw', 'muon'])
@pytest.mark.parametrize('loaded_lr', [1.0, 0.5])
def test_every_parameter_is_in_one_group(loaded_lr, name):
    """Every parameter is in one group, even in another contextualizer, such as an LSTM."""
    config = Config(8, 40, n_layer=1, n_head=1, n_embd=8, n_sense=2)
    model = Backpack(config, contextualizer=nn.LSTM(8, 8))
    optimizers = make_optimizers(model, Settings(optimizer=name, loaded_lr=loaded_lr))
    found = [p for own in optimizers for group in own.param_groups for p in group['params']]
    assert sorted(map(id, found)) == sorted(map(id, model.parameters()))
