"""How a run starts: from random weights, from others, or from its own checkpoint. s is train.Settings."""

import math
from dataclasses import fields, replace

import torch

from model import Backpack, Config
from rucksack.checkpoint import beside, from_checkpoint
from rucksack.common import UserError
from rucksack.published import from_pretrained

# What a resumed run may set anew: it changes results by rounding error at most. max_iters may grow, too.
FREE = ('out_dir', 'init_from', 'overwrite', 'allow_changes', 'eval_interval', 'log_interval', 'device',
        'compile', 'wandb_log', 'wandb_project', 'wandb_run_name')
SHAPE = ('model', 'n_layer', 'n_head', 'n_embd', 'n_sense', 'sense_hidden', 'dropout')  # what weights decide


def starting_model(s, meta: dict, state: dict) -> Backpack:
    """The model as a run starts with it; meta is that of its data, state the checkpoint it resumes, or {}."""
    if (there := beside(s.path)) and not state and not s.overwrite:
        raise UserError(f'{there[0]} exists; go on with --init_from=resume, replace it with --overwrite, or '
                        'choose another --out_dir')
    if not state and s.init_from == 'scratch':
        return random_model(s, meta)
    model = from_checkpoint(state, s.path) if state else from_pretrained(s.init_from)
    dropout = s.dropout if 'dropout' in s.given and not state else model.config.dropout
    c = replace(model.config, dropout=dropout)
    for name in SHAPE:  # the settings then say what the weights are
        has, given = getattr(c, name, 'backpack' if c.n_sense else 'gpt'), getattr(s, name)
        given = given or 4 * c.n_embd if name == 'sense_hidden' else given
        if name in s.given and given != has and (c.n_sense or 'sense' not in name):
            raise UserError(f'{s.path if state else s.init_from} has {name} {has}, not {given}; leave {name} '
                            'out, or train from scratch')
        setattr(s, name, has)
    if model.tokenizer not in (None, meta['tokenizer']) or c.n_vocab < meta['vocab_size']:
        raise UserError(f'{s.init_from} has another tokenizer than data/{s.dataset}; take other data')
    if c.block_size < s.block_size:
        raise UserError(f'{s.init_from} has block_size {c.block_size}; take that, or a smaller one')
    again = Backpack(c)  # with its dropout
    again.load_state_dict(model.state_dict())
    again.tokenizer = meta['tokenizer']
    return again


def random_model(s, meta: dict) -> Backpack:
    """A model of the settings' shape, before training; UserError where its numbers do not fit together."""
    torch.manual_seed(s.seed)
    try:
        model = Backpack(Config(  # with the vocabulary padded to a multiple of 64, which GPUs like
            vocab_size=math.ceil(meta['vocab_size'] / 64) * 64, n_vocab=meta['vocab_size'],
            block_size=s.block_size, n_layer=s.n_layer, n_head=s.n_head, n_embd=s.n_embd, dropout=s.dropout,
            n_sense=s.n_sense if s.model == 'backpack' else 0, sense_hidden=s.sense_hidden))
    except ValueError as error:
        raise UserError(str(error))
    model.tokenizer = meta['tokenizer']
    return model


def changes(s, state: dict) -> str:
    """What the settings change in a resumed run; UserError unless max_iters alone, or allow_changes."""
    was = {f.name: state['settings'].get(f.name) for f in fields(s) if f.name not in FREE + SHAPE}
    changed = [name for name in was if was[name] != getattr(s, name)]
    text = ', '.join(f'{name} {was[name]}, now {getattr(s, name)}' for name in changed)
    if s.max_iters < state['step']:
        raise UserError(f'{s.path} is at step {state["step"]}; max_iters is {s.max_iters}, take as many')
    if changed and changed != ['max_iters'] and not s.allow_changes:
        raise UserError(f'{s.path} has {text}; resume with the same, or add --allow_changes')
    return text
