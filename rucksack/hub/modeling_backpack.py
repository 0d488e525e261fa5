"""A Backpack for Hugging Face transformers (4.57 and 5), in one self-contained file:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Weights have the names of stanfordnlp/backpack-gpt2; rucksack's model.py explains the architecture.
"""

import math

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, GPT2Config, GPT2Model, GPT2PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.pytorch_utils import Conv1D
from transformers.utils import can_return_tuple


class BackpackConfig(GPT2Config):
    """GPT-2's settings, plus num_senses (k).

    n_vocab is the number of ids in use (None: all rows of the embeddings); sense_hidden is the
    hidden size of both sense MLPs (None: 4 n_embd).
    """

    model_type = 'backpack-gpt2'
    num_senses = 16
    n_vocab = None
    sense_hidden = None


class SenseNetwork(nn.Module):
    """Eq. 10: embeddings (B, T, d) -> senses C (B, T, k, d)."""

    def __init__(self, config: BackpackConfig):
        super().__init__()
        d = config.n_embd
        hidden = config.sense_hidden or 4 * d
        self.k = config.num_senses
        self.ln = nn.LayerNorm(d)
        self.block = nn.Module()
        self.block.ln_1 = nn.LayerNorm(d)
        self.block.ln_2 = nn.LayerNorm(d)
        self.block.mlp = GPT2MLP(hidden, config)
        self.final_mlp = GPT2MLP(hidden, config)
        self.final_mlp.c_proj = Conv1D(self.k * d, hidden)
        for mlp in (self.block.mlp, self.final_mlp):
            mlp.dropout = nn.Identity()  # dropout is in the contextualizer alone

    def forward(self, e):
        r = e + self.ln(e)  # (B, T, d)
        r = r + self.block.mlp(self.block.ln_1(r))  # (B, T, d)
        C = self.final_mlp(self.block.ln_2(r))  # (B, T, k*d)
        return C.unflatten(-1, (self.k, -1))  # (B, T, k, d)


class SenseWeights(nn.Module):
    """Eq. 12: contextual vectors h (B, T, d) -> alpha (B, k, T, T)."""

    def __init__(self, config: BackpackConfig):
        super().__init__()
        self.k = config.num_senses
        self.c_attn = nn.Linear(config.n_embd, 2 * config.n_embd)

    def query_and_key(self, h):
        """Compute the queries and keys of contextual vectors h (B, T, d), a head per sense."""
        both = self.c_attn(h).unflatten(-1, (2, self.k, -1))  # (B, T, 2, k, d/k)
        return both.permute(2, 0, 3, 1, 4)  # (B, k, T, d/k) each

    def forward(self, query, key, mask):
        """Compute Eq. 12, (B, k, T, S), at the last T of S positions, given the mask (B, S)."""
        T, S = query.shape[2], key.shape[2]
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # (B, k, T, S)
        causal = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(S - T)  # (T, S)
        seen = causal & mask[:, None, None]  # (B, 1, T, S)
        return scores.masked_fill(~seen, torch.finfo(query.dtype).min).softmax(-1)


class BackpackForCausalLM(GPT2PreTrainedModel, GenerationMixin):
    """A language model that predicts the next token from a weighted sum of senses."""

    config_class = BackpackConfig
    base_model_prefix = 'backpack'
    accepts_loss_kwargs = False  # forward ignores num_items_in_batch, so Trainer has to divide
    # Published files also hold copies of tied weights.
    _keys_to_ignore_on_load_unexpected = ['lm_head', 'word_embeddings', 'position_embeddings']

    def __init__(self, config: BackpackConfig):
        super().__init__(config)
        self.backpack = nn.Module()
        self.backpack.gpt2_model = GPT2Model(config)
        self.backpack.sense_network = SenseNetwork(config)
        self.backpack.sense_weight_net = SenseWeights(config)
        self.post_init()

    def get_input_embeddings(self):
        """Return the token embeddings E (V, d), for transformers."""
        return self.backpack.gpt2_model.wte

    def set_input_embeddings(self, embeddings):
        """Replace the token embeddings, for transformers."""
        self.backpack.gpt2_model.wte = embeddings

    def resize_token_embeddings(self, new_num_tokens=None, *args, **options):
        """Resize the token embeddings; from then on, the model predicts all rows."""
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **options)
        if new_num_tokens is not None:
            self.config.n_vocab = new_num_tokens
        return embeddings

    def senses(self, ids):
        """Compute Eq. 10, the senses C (.., k, d) of ids (..), the same in every text."""
        return self.backpack.sense_network(self.get_input_embeddings()(ids))

    def contextualize(self, input_ids, attention_mask=None, cache=None):
        """Compute Eq. 11, h (B, T, d) of the last T of S tokens, and the attention mask (B, S)."""
        B, T = input_ids.shape
        S = T if cache is None else cache.get_seq_length() + T
        if attention_mask is None:
            attention_mask = input_ids.new_ones(B, S)  # 0: padding
        mask = attention_mask.bool()
        if mask.shape != (B, S) or (mask != attention_mask).any():
            raise ValueError('attention_mask must be 0 or 1 for each token; texts cannot be packed')
        n = mask.sum(-1).max().item()
        if n > self.config.n_positions:
            raise ValueError(f'the text has {n} tokens; this model reads {self.config.n_positions}')
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)[:, -T:]  # (B, T)
        h = self.backpack.gpt2_model(
            input_ids, cache, attention_mask=mask.long(), position_ids=position_ids,
            use_cache=cache is not None)[0]  # (B, T, d)
        return h, mask

    def alpha(self, input_ids, attention_mask=None):
        """Compute Eq. 12, the weights alpha (B, k, T, T) of positions for the senses so far."""
        h, mask = self.contextualize(input_ids, attention_mask)
        weight_net = self.backpack.sense_weight_net
        return weight_net(*weight_net.query_and_key(h), mask)

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, labels=None, C=None, alpha=None, *,
                cache=None, past_key_values=None, use_cache=False, **unused):
        """Return logits (B, T, V) of input_ids (B, T), and the loss on labels (B, T) except -100.

        C (B, T, k, d) and alpha (B, k, T, T) are senses and weights to use in place of the model's.
        With a cache (past_key_values before transformers 5.24), input_ids are the tokens after the
        cached ones.
        """
        config = self.config
        unused.pop('cache_position', None)  # transformers 4 gives it
        for name, value in unused.items():
            if value is not None and value is not False:  # PEFT passes None
                raise TypeError(f'a Backpack takes no {name}')
        if cache is None:
            cache = past_key_values
        if cache is None and use_cache:
            cache = transformers.DynamicCache(config=config)
        C = self.senses(input_ids) if C is None else C  # (B, T, k, d), Eq. 10
        values = C.transpose(1, 2)  # (B, k, T, d)
        if alpha is None:
            h, mask = self.contextualize(input_ids, attention_mask, cache)  # Eq. 11
            query, key = self.backpack.sense_weight_net.query_and_key(h)  # (B, k, T, d/k) each
            if cache is not None:  # one more layer of attention, whose values are the senses
                if len(cache.layers) == config.n_layer:
                    cache.layers.append(transformers.cache_utils.DynamicLayer())
                key, values = cache.update(key, values, config.n_layer)  # (B, k, S, ..)
            alpha = self.backpack.sense_weight_net(query, key, mask)  # (B, k, T, S), Eq. 12
        o = (alpha @ values).sum(1)  # (B, T, d), Eq. 2
        E = self.get_input_embeddings().weight[:config.n_vocab]  # (V, d)
        logits = F.linear(o, E)  # (B, T, V), Eq. 9
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, len(E))
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss, logits, cache)
