"""What a run starts from, if not from scratch: its own checkpoint, or another model."""

from dataclasses import replace
from pathlib import Path

from rucksack.checkpoint import load_file, make_model
from rucksack.data import data_folder, data_id, read_meta
from rucksack.errors import UserError, user_errors
from rucksack.model import GPT, Backpack, Config

# Settings that a resumed run may change: how long it runs, how often it reports, and where.
# max_iters changes the schedule; device and compile change rounding and dropout masks.
STEERING = {'max_iters', 'eval_interval', 'log_interval', 'device', 'compile', 'wandb_log'}


def load_run(s, flags: set[str]) -> tuple:
    """Load the checkpoint in out_dir; also returns the settings to resume with.

    flags names the settings that were typed. Raises UserError if one contradicts the run, or if the
    dataset has changed.
    """
    path = Path(s.out_dir, 'ckpt.pt')
    hint = f'to fine-tune its parameters, use --init_from={path} and another --out_dir'
    checkpoint = load_file(path)
    free = flags & STEERING | {'out_dir', 'init_from', 'overwrite', 'keep_every'}  # an old setting
    with user_errors(path, hint):
        decided = {
            name: x
            for name, x in checkpoint['settings'].items()
            if name not in free}
        s = with_decided(s, flags, decided)
        if checkpoint['data'] != data_id(read_meta(data_folder(s.dataset))):
            raise UserError(f'data/{s.dataset} has changed since it was trained; {hint}')
    return checkpoint, s


def load_given(s, flags: set[str]) -> tuple:
    """Load the model that init_from names; also returns the settings with its sizes.

    From a Transformer, we make a Transformer or, if flags has model, a Backpack with the n_sense
    and sense_hidden in s. Raises UserError if the model cannot read the ids of the dataset.
    """
    from rucksack.loaded import from_pretrained  # published formats, for this flag alone
    given, tokenizer = from_pretrained(s.init_from)
    config = given.config
    meta = read_meta(data_folder(s.dataset))
    if tokenizer != meta['tokenizer']:
        raise UserError(f'{s.init_from} and data/{s.dataset} have different tokenizers; run python '
                        f'prepare.py {s.dataset} --text FILE --like {s.init_from} --overwrite')
    decided = {
        'block_size': min(s.block_size, config.block_size),
        'n_layer': config.n_layer,
        'n_head': config.n_head,
        'n_embd': config.n_embd}
    if config.n_sense:
        decided |= {
            'model': 'backpack',
            'n_sense': config.n_sense,
            'sense_hidden': config.sense_hidden}
    elif 'model' not in flags:
        decided['model'] = 'gpt'
    with user_errors(s.init_from):
        return given, with_decided(s, flags, decided)


def with_decided(settings, flags: set[str], decided: dict):
    """Replace the settings that a checkpoint decides.

    Raises UserError if a flag contradicts one, unless the flag is auto or -1: then the run chooses.
    """
    for name in sorted(flags & decided.keys()):
        value = getattr(settings, name)
        if value not in (decided[name], 'auto', -1):
            raise UserError(f'it has {name}={decided[name]}; drop --{name}={value}')
    return replace(settings, **decided)


def fine_tune(given: Backpack | GPT, config: Config) -> Backpack | GPT:
    """Make a model with given parameters, and new senses where a Backpack starts from a GPT.

    Such a Backpack reads at most config.block_size, because it is not trained on longer texts.
    Otherwise the model keeps its block_size.
    """
    state = given.state_dict()
    block_size = given.config.block_size
    has_new_senses = config.n_sense > given.config.n_sense
    if has_new_senses:
        block_size = config.block_size
        state['contextualizer.wpe.weight'] = state['contextualizer.wpe.weight'][:block_size]
    config = replace(config, vocab_size=given.config.vocab_size, block_size=block_size)
    model = make_model(config)
    model.load_state_dict(state, strict=not has_new_senses)
    if has_new_senses:
        # Trained embeddings are larger than new ones, whose standard deviation is 0.02. Smaller
        # senses keep the first logits as small as in a run from scratch.
        model.sense_network.final_mlp.c_proj.weight.data *= 0.02 / given.wte.weight.std()
    return model
