"""Find, read and write weights: our checkpoints, published formats, nanoGPT's, and the Hub."""

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save
from torch import Tensor

from rucksack.errors import UserError, user_errors
from rucksack.model import GPT, Backpack, Config
from rucksack.tokenizer import (
    ENGLISH,
    GPT2,
    GPT2_VOCAB,
    load_json,
    load_tokenizer,
    read_tokenizer,
    tokenizer_files,
    vocab_size,
)

CODE = Path(__file__).with_name('modeling_backpack.py')  # exported, for transformers to run
CARD = Path(__file__).with_name('card.md')
BUNDLED = {'english': ENGLISH, 'english_gpt': ENGLISH.with_name('english_gpt')}  # name -> folder
WEIGHTS = ('model.safetensors', 'pytorch_model.bin')  # the first one in a folder counts
SMALL_FILES = (
    'config.json', 'tokenizer.json', 'tokenizer_config.json', 'vocab.json', 'merges.txt')
HUB_NAME = r'(?!out/|data/)(gpt2(-\w+)?|[\w-][\w.-]*/[\w.-]+)'
LEVANTER = 'backpack_model.'  # Levanter's auto_map names this module; its architectures is a string
FIXED = {  # settings of a config.json and their allowed values; export writes the first
    'model_type': ('gpt2', 'backpack-gpt2'),
    'activation_function': ('gelu_new',),
    'layer_norm_epsilon': (1e-5,),
    'scale_attn_weights': (True,),
    'tie_word_embeddings': (True,),
    'sense_intermediate_scale': (4,)}
SIZE_NAMES = {  # settings of a config.json -> fields of our Config
    'n_positions': 'block_size', 'vocab_size': 'vocab_size', 'n_vocab': 'n_vocab',
    'n_layer': 'n_layer', 'n_head': 'n_head', 'n_embd': 'n_embd', 'resid_pdrop': 'dropout',
    'num_senses': 'n_sense', 'sense_hidden': 'sense_hidden'}


# -----------------------------------------------------------------------------
# Finding weights.


def from_pretrained(source: str | Path) -> tuple[Backpack | GPT, dict | None]:
    """Load a model for evaluation, on the CPU, and the description of its tokenizer.

    source is a checkpoint of train.py or its folder; a folder with config.json and weights in the
    format of stanfordnlp/backpack-gpt2 or gpt2; the name of such a repository on the Hugging Face
    Hub; or one of BUNDLED, such as 'english'. Raises UserError if the files do not match.
    """
    path = find(source)
    tokenizer = None
    if path.is_dir():
        model, tokenizer = from_published(path)
    else:
        checkpoint = load_file(path)
        with user_errors(path):
            if 'model_args' in checkpoint:
                model = from_nanogpt(checkpoint, path)
            else:
                model = from_checkpoint(checkpoint)
                tokenizer = checkpoint['tokenizer']
                load_tokenizer(tokenizer)
    n_vocab = model.config.n_vocab
    if tokenizer is None and n_vocab == GPT2_VOCAB:
        print(f"{path} has no tokenizer; assuming GPT-2's", file=sys.stderr)
        tokenizer = GPT2
    if tokenizer and vocab_size(tokenizer) != n_vocab:
        raise UserError(f'{path}: its tokenizer has {vocab_size(tokenizer):,} ids, but its '
                        f'model has {n_vocab:,}; use the tokenizer of the model')
    return model, tokenizer


def find(source: str | Path) -> Path:
    """Find the checkpoint or folder of weights that a source names; download it if needed."""
    source = str(source)
    path = BUNDLED.get(source, Path(source))
    if source in BUNDLED and Path(source).exists():
        print(f'{source} is the bundled model; for the folder, write ./{source}', file=sys.stderr)
    if (path / 'ckpt.pt').exists():
        return path / 'ckpt.pt'
    if path.is_file() or (path / 'config.json').exists():
        return path
    if re.fullmatch(HUB_NAME, source) and not path.exists():
        return download(source)
    raise UserError(f'no weights found at {source!r}; give a checkpoint, the folder of a run in '
                    'out/, an exported folder, a name on the Hugging Face Hub, or english')


def download(name: str) -> Path:
    """Download the config, tokenizer and weights of a repository; return their folder.

    Without a network, only cached files are used.
    """
    import huggingface_hub as hub
    problem = 'was not found locally, and downloading it failed'
    with user_errors(name, f'there is no folder {name} here', problem):
        for weights in WEIGHTS:
            folder = Path(hub.snapshot_download(name, allow_patterns=[*SMALL_FILES, weights]))
            if weights_in(folder):
                break
    return folder


# -----------------------------------------------------------------------------
# Files, and the models in them.


def load_file(path: Path, mmap: bool = False) -> dict:
    """Load the dictionary in a .safetensors or a torch.save file; no code in it runs.

    With mmap, tensors stay on disk until they are used, and their checksums are not verified.
    """
    with user_errors(path):
        if path.suffix == '.safetensors':
            return load_safetensors(path)
        is_zip = zipfile.is_zipfile(path)  # true except for very old files
        if is_zip and not mmap and zipfile.ZipFile(path).testzip():  # torch ignores CRCs
            raise ValueError('a checksum is wrong')
        return dict(torch.load(path, map_location='cpu', weights_only=True, mmap=mmap and is_zip))


def make_model(config: Config) -> Backpack | GPT:
    """Make an untrained model: a Backpack or, without senses, a GPT."""
    return Backpack(config) if config.n_sense else GPT(config)


def model_with(config: Config, weights: dict[str, Tensor]) -> Backpack | GPT:
    """Make a model with given weights, in the default dtype; torch refuses them unless all fit."""
    with torch.device('meta'):
        model = make_model(config)
    model.to_empty(device='cpu')
    model.load_state_dict(weights)
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            raise ValueError(f'{name} has a value that is not finite')
    return model.eval()


def from_checkpoint(checkpoint: dict) -> Backpack | GPT:
    """Load the model in a checkpoint from train.py."""
    return model_with(Config(**checkpoint['model_config']), checkpoint['model'])


def count_parameters(model: Backpack | GPT) -> dict[str, int]:
    """Count the parameters, in 'total' and outside the sense network ('contextualizer')."""
    counts = {'total': 0, 'contextualizer': 0}
    for name, p in model.named_parameters():
        counts['total'] += p.numel()
        if 'sense_network.' not in name:
            counts['contextualizer'] += p.numel()
    return counts


# -----------------------------------------------------------------------------
# The published format. Its Conv1D layers store transposed weights; its sense_weights is a Linear.

BODY = 'backpack.gpt2_model.'  # GPT-2's own format has 'transformer.' instead, or nothing
NAMES = {  # our prefix -> published prefix without BODY; the first match counts, in both directions
    'wte.': 'wte.',
    'contextualizer.blocks.': 'h.',
    'sense_weights.': 'backpack.sense_weight_net.',
    'sense_network.ln_0.': 'backpack.sense_network.ln.',
    'sense_network.final_mlp.': 'backpack.sense_network.final_mlp.',
    'sense_network.': 'backpack.sense_network.block.',
    'contextualizer.': ''}
COPIES = {  # second copies of tied weights, named without BODY
    'lm_head.weight': 'wte.weight',
    'backpack.word_embeddings.weight': 'wte.weight',
    'backpack.position_embeddings.weight': 'wpe.weight'}
TRANSPOSED = ('contextualizer.blocks.', 'sense_network.')


def replace_prefix(name: str, prefixes: dict[str, str]) -> str:
    """Replace the prefix of a name by the first rule that matches."""
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def to_published_names(model: Backpack | GPT, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights by their published names, on the CPU."""
    body = BODY if model.config.n_sense else 'transformer.'
    state = {}
    for name, weight in model.state_dict().items():
        if weight.dim() == 2 and name.startswith(TRANSPOSED):
            weight = weight.t()
        theirs = replace_prefix(name, NAMES)
        if not theirs.startswith('backpack.'):
            theirs = body + theirs
        state[theirs] = weight.to(dtype).contiguous().cpu()
    return state


def to_our_names(state: dict[str, Tensor], transposed: tuple) -> dict[str, Tensor]:
    """Rename weights to our names, and transpose those with the given prefixes.

    Raises ValueError if copies of tied weights differ.
    """
    names = {theirs: ours for ours, theirs in NAMES.items()}
    own = {}
    for theirs, weight in state.items():
        if theirs.endswith(('.attn.bias', '.attn.masked_bias')):  # a mask
            continue
        theirs = theirs.removeprefix('_orig_mod.').removeprefix('transformer.').removeprefix(BODY)
        name = replace_prefix(COPIES.get(theirs, theirs), names)
        if weight.dim() == 2 and name.startswith(transposed):
            weight = weight.t()
        if name in own and not torch.equal(own[name], weight):
            raise ValueError(f'{theirs} differs from another copy of {name}')
        own[name] = weight
    return own


def weights_in(folder: Path) -> list[Path]:
    """List the weight files in a folder; the first one counts."""
    return [folder / name for name in WEIGHTS if (folder / name).exists()]


def from_published(folder: Path) -> tuple[Backpack | GPT, dict | None]:
    """Load a published Backpack or GPT-2, and its tokenizer, from its folder."""
    files = weights_in(folder)
    if not files:
        raise UserError(f'{folder} has no {" or ".join(WEIGHTS)}; if its weights are in shards, '
                        'save them again in one file, with a large max_shard_size')
    state = load_file(files[0])
    with user_errors(folder, problem='cannot be loaded as a Backpack or a GPT-2'):
        settings = load_json(folder / 'config.json')
        tokenizer = read_tokenizer(folder, settings.get('eos_token_id'))
        config = config_from_json(settings, tokenizer)
        model = model_with(config, to_our_names(state, TRANSPOSED))
    is_levanters = (LEVANTER in str(settings.get('auto_map'))
                    or isinstance(settings.get('architectures'), str))
    if config.n_sense and is_levanters:
        for part in model.sense_network.final_mlp.c_proj.parameters():
            part.data /= config.n_sense  # Levanter divides Eq. 2's sum by k
    # In the published class, layer i divides its scores by i + 1 unless the config says no.
    if settings.get('scale_attn_by_inverse_layer_idx', config.n_sense > 0):
        for i, block in enumerate(model.contextualizer.blocks):
            for weight in block.attn.c_attn.parameters():
                weight.data[:config.n_embd] /= i + 1  # divides queries, and thus scores
    return model, tokenizer


def config_from_json(settings: dict, tokenizer: dict | None) -> Config:
    """Make our Config from a config.json; raises ValueError for another architecture."""
    for name, allowed in FIXED.items():
        if settings.get(name, allowed[0]) not in allowed:
            raise ValueError(f'its {name} is {settings[name]}; it must be {allowed[0]}')
    n_vocab = n_vocab_of(settings['vocab_size'], tokenizer)
    defaults = {'n_vocab': n_vocab, 'num_senses': 0, 'sense_hidden': 0, 'resid_pdrop': 0.0}
    settings = defaults | settings
    return Config(**{ours: settings[theirs] for theirs, ours in SIZE_NAMES.items()})


def n_vocab_of(rows: int, tokenizer: dict | None) -> int:
    """Count the rows of the embedding matrix that stand for ids; the others are padding.

    Without a tokenizer, up to 255 rows beyond GPT-2's ids count as padding, as in backpack-gpt2.
    """
    if tokenizer:
        return min(rows, vocab_size(tokenizer))
    is_padded = GPT2_VOCAB <= rows < GPT2_VOCAB + 256
    return GPT2_VOCAB if is_padded else rows


# -----------------------------------------------------------------------------
# Checkpoints of nanoGPT.


def from_nanogpt(checkpoint: dict, path: Path) -> GPT:
    """Load a Transformer that nanoGPT's train.py saved.

    NOTE: nanoGPT computes GELU exactly; ours is GPT-2's approximation, so logits differ slightly.
    """
    args = checkpoint['model_args']
    weights = to_our_names(checkpoint['model'], transposed=())
    if not args.pop('bias'):
        print(f'{path} has no biases; they are set to 0', file=sys.stderr)
        for name, weight in list(weights.items()):
            if not name.endswith(('wte.weight', 'wpe.weight')):
                weights[name.replace('.weight', '.bias')] = torch.zeros(len(weight))
    config = Config(**args, n_vocab=n_vocab_of(args['vocab_size'], None), n_sense=0)
    return model_with(config, weights)


# -----------------------------------------------------------------------------
# Export.


def export(model: Backpack | GPT, tokenizer: dict, folder: str | Path,
           dtype: torch.dtype = torch.float32) -> None:
    """Write a Backpack in the format of stanfordnlp/backpack-gpt2, or a Transformer in gpt2's.

    tokenizer is a description, as from_pretrained returns it; weights are written in dtype. Raises
    UserError if the folder has files or cannot be made, or if the contextualizer is not a GPT-2.
    The published code can load a Backpack only if sense_hidden is 4 * n_embd.
    """
    c = model.config
    folder = Path(folder).resolve()
    if not hasattr(model.contextualizer, 'wpe'):  # its position embeddings
        raise UserError('only a Backpack whose contextualizer is a GPT-2 can be exported')
    files = tokenizer_files(tokenizer, c.block_size)
    files['config.json'] = settings_of(c, load_tokenizer(tokenizer).eot_token)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        new = Path(temporary, folder.name)
        new.mkdir()
        (new / WEIGHTS[0]).write_bytes(save(to_published_names(model, dtype), {'format': 'pt'}))
        for name, content in files.items():
            text = json.dumps(content, ensure_ascii=False) + '\n'
            (new / name).write_text(text, encoding='utf-8')
        shutil.copyfile(CARD, new / 'README.md')
        if c.n_sense:
            shutil.copyfile(CODE, new / CODE.name)
        try:
            new.rename(folder)  # appears whole or not at all
        except OSError as error:  # such as a folder with files; str(error) names temporary ones
            raise UserError(f'{folder} cannot be made ({error.strerror}); give the name of a new '
                            'folder')


def settings_of(c: Config, end: int) -> dict:
    """Make the contents of config.json for our config and the id of end-of-text."""
    settings = {
        'architectures': ['GPT2LMHeadModel'],
        'scale_attn_by_inverse_layer_idx': False,
        'attn_pdrop': c.dropout,
        'embd_pdrop': c.dropout,
        'bos_token_id': end,
        'eos_token_id': end}
    settings |= {name: allowed[0] for name, allowed in FIXED.items()}
    settings |= {theirs: getattr(c, ours) for theirs, ours in SIZE_NAMES.items()}
    if c.n_sense:
        settings |= {
            'architectures': ['BackpackForCausalLM'], 'model_type': 'backpack-gpt2',
            'auto_map': {
                'AutoConfig': f'{CODE.stem}.BackpackConfig',
                'AutoModelForCausalLM': f'{CODE.stem}.BackpackForCausalLM'}}
    return settings
