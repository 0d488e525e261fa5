'use strict';
// A Backpack in plain JavaScript: tokenizer, forward pass, edits, text. It runs in a worker of the page that
// sample.py --html writes; ui.js asks it. Names and shapes are those of model.py: T positions, d = n_embd,
// k = n_sense, V ids; j is a position, l a sense. Vectors are typed arrays, matrices lie row after row.

// ----------------------------------------------------------------------------
// Text -> ids: GPT-2's byte-pair encoding, or the toy's words. A token is a string of its bytes.

const word = String.raw`\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}`, space = String.raw`\p{White_Space}`;
const TOY = ` ?[${word}]+|[^${word}${space}]|${space}+`;  // as in toy.py, and in tiktoken
const GPT2 = String.raw`'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^${space}\p{L}\p{N}]+|` +
  `${space}+(?![^${space}])|${space}+`;

class Tokenizer {
  constructor({tokens, toy}) {
    Object.assign(this, {tokens, pattern: new RegExp(toy ? TOY : GPT2, 'gu')});
    this.hidden = toy ? 256 : 0;         // bytes, which the toy world never spells
    this.rank = new Map(tokens.map((token, id) => [token, id]));
    this.end = tokens.length;            // the id of end-of-text, which no text spells
  }

  encode(text) {
    return (text.match(this.pattern) ?? []).flatMap(piece => this.merge(bytes(piece)));
  }

  merge(piece) {                         // of all neighbours that make a token, join those of the lowest rank
    if (this.rank.has(piece)) return [this.rank.get(piece)];
    const parts = [...piece], pair = i => this.rank.get(parts[i] + parts[i + 1]) ?? Infinity;
    const ranks = parts.slice(1).map((_, i) => pair(i));
    for (;;) {
      let best = 0;
      for (let i = 1; i < ranks.length; i++) if (ranks[i] < ranks[best]) best = i;
      if (!(ranks[best] < Infinity)) return parts.map(part => this.rank.get(part));
      parts.splice(best, 2, parts[best] + parts[best + 1]);
      ranks.splice(best, 1);
      if (best < ranks.length) ranks[best] = pair(best);
      if (best) ranks[best - 1] = pair(best - 1);
    }
  }

  decode(ids) {
    return utf8(ids.filter(id => id < this.end).map(id => this.tokens[id]).join(''));
  }

  pieces(ids) {                          // the text of each token; a character of several stands at its last
    const decoder = new TextDecoder();
    return ids.map((id, j) => decoder.decode(
      codes(this.tokens[id] ?? '<|endoftext|>'), {stream: j < ids.length - 1}));
  }

  label(id) {                            // a token as a word: · before what has no space before it
    const token = this.tokens[id] ?? '<|endoftext|>', text = utf8(token.replace(/^ (?=.)/s, ''));
    const seen = text.includes('\ufffd') ? [...token].map(c => '\\x' + c.charCodeAt().toString(16)).join('') :
      text.replace(/ /g, '␣').replace(/[\p{C}\p{Z}]/gu, c => JSON.stringify(c).slice(1, -1));
    return (token[0] !== ' ' && /[\p{L}\p{N}]/u.test(seen[0]) ? '·' : '') + seen;
  }

  forms(word) {                          // the ids of a word: inside a text and, where that is one, at its start
    if (/^#\d+$/.test(word) && +word.slice(1) <= this.end) return [+word.slice(1)];
    const inside = this.encode(' ' + word), start = this.encode(word);
    if (inside.length !== 1 || !word)
      throw Error(`“${word}” is no single word of this vocabulary but ${inside.map(id => this.label(id)).join(' + ')}`);
    return start.length === 1 ? [inside[0], start[0]] : inside;
  }

  name(id) {                             // the word that forms() finds again, else #id
    const token = this.tokens[id] ?? '', word = utf8(token).slice(1);
    return token[0] === ' ' && word && this.rank.get(bytes(' ' + word)) === id && !/[:#@*=&]/.test(word) ? word : `#${id}`;
  }
}

const bytes = text => Array.from(new TextEncoder().encode(text), c => String.fromCharCode(c)).join('');
const codes = token => Uint8Array.from(token, c => c.charCodeAt());
const utf8 = token => new TextDecoder().decode(codes(token));

// ----------------------------------------------------------------------------
// Arithmetic on vectors.

function linear(W, b, x) {               // W (m, n), b (m) or none, x (n) -> W x + b (m)
  const n = x.length, m = W.length / n, whole = n - n % 4, y = new Float32Array(m);
  for (let i = 0, w = 0; i < m; i++, w += n) {
    let s = b ? b[i] : 0, s1 = 0, s2 = 0, s3 = 0, j = 0;
    for (; j < whole; j += 4) {
      s += W[w + j] * x[j];
      s1 += W[w + j + 1] * x[j + 1];
      s2 += W[w + j + 2] * x[j + 2];
      s3 += W[w + j + 3] * x[j + 3];
    }
    for (; j < n; j++) s += W[w + j] * x[j];
    y[i] = s + s1 + s2 + s3;
  }
  return y;
}

function dot(x, y, n, i = 0, j = 0) {    // of n numbers from x[i] and y[j] on
  let s = 0;
  for (let m = 0; m < n; m++) s += x[i + m] * y[j + m];
  return s;
}

function add(y, x, factor = 1, from = 0, to = 0, n = x.length) {  // y[to ..] += factor * x[from ..]
  for (let i = 0; i < n; i++) y[to + i] += factor * x[from + i];
  return y;
}

function softmax(z) {                    // in place
  const top = z.reduce((a, b) => a > b ? a : b, -Infinity);
  let sum = 0;
  for (let i = 0; i < z.length; i++) sum += z[i] = Math.exp(z[i] - top);
  for (let i = 0; i < z.length; i++) z[i] /= sum;
  return z;
}

const gelu = x => 0.5 * x * (1 + Math.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));

// ----------------------------------------------------------------------------
// The model: what stays the same in every text.

class Backpack {
  constructor(data, blob) {              // data.arrays: [name, rows, columns, whether in 8 bits], as in blob
    Object.assign(this, data.config, {w: {}, known: new Map()});  // n_embd, n_head, n_layer, n_sense, block_size
    let at = 0;
    for (const [name, rows, columns, small] of data.arrays) {
      const floats = small ? rows : rows * columns, scale = new Float32Array(blob.slice(at, at += 4 * floats).buffer);
      if (small) {
        const q = new Int8Array(blob.buffer, at, rows * columns), x = this.w[name] = new Float32Array(q.length);
        at += q.length;
        for (let i = 0; i < q.length; i++) x[i] = q[i] * scale[i / columns | 0];
      } else this.w[name] = scale;
    }
    this.V = this.w['wte.weight'].length / this.n_embd;
  }

  row(name, i) {                         // row i of a matrix (.., d)
    return this.w[name].subarray(i * this.n_embd, (i + 1) * this.n_embd);
  }

  linear(name, x) {
    return linear(this.w[name + '.weight'], this.w[name + '.bias'], x);
  }

  mlp(name, x) {
    return this.linear(name + '.c_proj', this.linear(name + '.c_fc', x).map(gelu));
  }

  norm(name, x) {                        // LayerNorm
    const n = x.length, mean = x.reduce((a, b) => a + b) / n;
    const scale = 1 / Math.sqrt(x.reduce((a, b) => a + (b - mean) ** 2, 0) / n + 1e-5);
    const w = this.w[name + '.weight'], b = this.w[name + '.bias'];
    return x.map((y, i) => (y - mean) * scale * w[i] + b[i]);
  }

  senses(id) {                           // Eq. 10: C (k*d) of an id, the same in every text
    if (!this.known.has(id)) {
      if (this.known.size > 1000) this.known.clear();
      const e = this.row('wte.weight', id), r = add(this.norm('sense_network.ln_0', e), e);
      add(r, this.mlp('sense_network.mlp', this.norm('sense_network.ln_1', r)));
      this.known.set(id, this.mlp('sense_network.final_mlp', this.norm('sense_network.ln_2', r)));
    }
    return this.known.get(id);
  }

  logits(o) {                            // Eq. 9: E o
    return linear(this.w['wte.weight'], null, o);
  }
}

// ----------------------------------------------------------------------------
// A text: what the model has computed for each of its tokens, kept while the text goes on or loses its end.

class Text {
  constructor(model) {
    const {n_layer, n_embd, block_size} = model, states = () => new Float32Array(block_size * n_embd);
    Object.assign(this, {model, ids: [], h: [], query: [], key: []});
    this.layers = Array.from({length: n_layer}, () => ({key: states(), value: states()}));
  }

  read(ids) {
    let t = 0;
    while (t < ids.length && ids[t] === this.ids[t]) t++;
    this.ids = ids.slice();
    for (; t < ids.length; t++) this.step(t);
    return this;
  }

  step(t) {                              // Eq. 11: h at position t, by a GPT-2
    const {model, ids} = this, {n_embd: d, n_head, n_sense} = model, size = d / n_head;
    const x = add(model.row('wte.weight', ids[t]).slice(), model.row('contextualizer.wpe.weight', t));
    this.layers.forEach(({key, value}, i) => {
      const block = `contextualizer.blocks.${i}.`, y = new Float32Array(d);
      const qkv = model.linear(block + 'attn.c_attn', model.norm(block + 'ln_1', x));  // (3*d)
      key.set(qkv.subarray(d, 2 * d), t * d);
      value.set(qkv.subarray(2 * d), t * d);
      for (let head = 0; head < d; head += size) {
        const z = new Float32Array(t + 1).map((_, j) => dot(qkv, key, size, head, j * d + head) / Math.sqrt(size));
        softmax(z).forEach((a, j) => add(y, value, a, j * d + head, head, size));
      }
      add(x, model.linear(block + 'attn.c_proj', y));
      add(x, model.mlp(block + 'mlp', model.norm(block + 'ln_2', x)));
    });
    this.h[t] = model.norm('contextualizer.ln_f', x);
    if (!n_sense) return;
    const qk = model.linear('sense_weights.c_attn', this.h[t]);  // (2*d)
    [this.query[t], this.key[t]] = [qk.subarray(0, d), qk.subarray(d)];
  }

  alpha() {                              // Eq. 12: the weights (T, k) that the last position gives
    const T = this.ids.length, {n_embd: d, n_sense: k} = this.model, size = d / k, all = new Float32Array(T * k);
    for (let l = 0; l < k; l++)
      softmax(new Float32Array(T).map((_, j) =>
        dot(this.query[T - 1], this.key[j], size, l * size, l * size) / Math.sqrt(size))
      ).forEach((a, j) => { all[j * k + l] = a; });
    return all;
  }

  represent(edit) {                      // Eq. 2: o = sum_j sum_l alpha_jl C(x_j)_l; of a Transformer its h
    const {model, ids} = this, {n_embd: d, n_sense: k} = model, o = new Float32Array(d);
    if (!k) return this.h[ids.length - 1];
    const alpha = this.alpha();
    ids.forEach((id, j) => {
      const C = edit.senses(id);
      for (let l = 0; l < k; l++) add(o, C, alpha[j * k + l] * edit.factor(id, j, l), l * d, 0, d);
    });
    return o;
  }

  probs(edit, temperature = 1) {         // of the next token (V)
    const z = this.model.logits(this.represent(edit));
    return softmax(temperature === 1 ? z : z.map(x => x / temperature));
  }
}

// ----------------------------------------------------------------------------
// An edit: {scale: {'nurse:10': 0}, replace: [['MacBook', 'Apple', 'HP']]}. Before the colon stands a word,
// #id, * for every word, or @j for position j; after it senses as 10 or 3-5,10, or she/he: the one that most
// separates these.

class Edit {
  constructor(model, tokenizer, {scale = {}, replace = []} = {}) {
    const k = model.n_sense, ones = () => new Float32Array(k).fill(1);
    Object.assign(this, {model, words: new Map(), places: new Map(), all: ones(), replaced: new Map()});
    const most = (word, ...pair) => {    // the sense of a word that most separates two others
      const [C, a, b] = [word, ...pair].map((name, i) => {
        const id = tokenizer.forms(name.trim())[0];
        return i ? model.row('wte.weight', id) : model.senses(id);
      });
      const gaps = Array.from(ones(), (_, l) => Math.abs(dot(C, a, a.length, l * a.length) - dot(C, b, b.length, l * b.length)));
      return gaps.indexOf(Math.max(...gaps));
    };
    for (const [key, factor] of Object.entries(scale)) {
      const [, where, which] = /^(.+):([\d,\s-]+|[^/]+\/[^/]+)$/.exec(key) ?? [];
      const senses = which?.includes('/') ? [most(where, ...which.split('/'))] : (which ?? '').split(',').flatMap(part => {
        const [first, last = first] = part.split('-').map(Number);
        return Array.from({length: Math.min(k, last - first + 1)}, (_, i) => first + i);
      });
      if (!where || !senses.length || !senses.every(l => l >= 0 && l < k) || !Number.isFinite(factor))
        throw Error(`“${key}” is not WORD:SENSES of senses 0 to ${k - 1}`);
      const of = (map, name) => map.get(name) ?? map.set(name, ones()).get(name);
      const rows = where === '*' ? [this.all] : where[0] === '@' ? [of(this.places, +where.slice(1))] :
        tokenizer.forms(where.trim()).map(id => of(this.words, id));
      for (const row of rows) for (const l of senses) row[l] *= factor;
    }
    for (const [word, old, now] of replace) {  // section 6.3: C' = C + (C . r) (a / |a|^2 - r / |r|^2)
      const [r, a] = [old, now].map(name => model.row('wte.weight', tokenizer.forms(name)[0])), d = r.length;
      const move = add(r.map(x => -x / dot(r, r, d)), a, 1 / dot(a, a, d));
      for (const id of tokenizer.forms(word)) {
        const before = this.senses(id), C = before.slice();
        for (let l = 0; l < k; l++) add(C, move, dot(before, r, d, l * d), 0, l * d);
        this.replaced.set(id, C);
      }
    }
  }

  senses(id) {
    return this.replaced.get(id) ?? this.model.senses(id);
  }

  factor(id, j, l) {
    return this.all[l] * (this.words.get(id)?.[l] ?? 1) * (this.places.get(j)?.[l] ?? 1);
  }
}

// ----------------------------------------------------------------------------
// What the page asks.

let model, tokenizer, text, latest = 0;

const editOf = edits => new Edit(model, tokenizer, edits);
const idsOf = string => { const ids = tokenizer.encode(string); return ids.length ? ids : [tokenizer.end]; };

function top(z, n, sign = 1, from = tokenizer.hidden) {  // the ids of the n largest or smallest, in order
  const ids = [];
  for (let id = from; id < z.length; id++) {
    if (ids.length === n && sign * (z[id] - z[ids[n - 1]]) <= 0) continue;
    const at = ids.findIndex(other => sign * (z[id] - z[other]) > 0);
    ids.splice(at < 0 ? ids.length : at, 0, id);
    if (ids.length > n) ids.pop();
  }
  return ids;
}

function random(seed) {                  // numbers from 0 to 1 (mulberry32)
  return () => {
    let t = seed = seed + 0x6d2b79f5 | 0;
    t = Math.imul(t ^ t >>> 15, t | 1);
    t ^= t + Math.imul(t ^ t >>> 7, t | 61);
    return ((t ^ t >>> 14) >>> 0) / 2 ** 32;
  };
}

const answers = {
  load({data, weights}) {
    const binary = atob(weights), blob = new Uint8Array(binary.length);
    for (let i = 0; i < blob.length; i++) blob[i] = binary.charCodeAt(i);
    model = new Backpack(data, blob);
    tokenizer = new Tokenizer(data.tokenizer);
    text = new Text(model);
  },

  encode({string}) {
    return tokenizer.encode(string);
  },

  predict({string, edits, n = 10}) {     // the likeliest words, of all that there are
    const p = text.read(idsOf(string).slice(-model.block_size)).probs(editOf(edits));
    return top(p, n, 1, 0).map(id => [tokenizer.pieces([id])[0], p[id]]);
  },

  look({string, edits, compare}) {       // all that the page shows of a prediction
    const all = idsOf(string), ids = all.slice(-model.block_size), edit = editOf(edits), k = model.n_sense;
    if (text.read(ids).told !== ids.join()) [text.told, text.before] = [ids.join(), text.probs(editOf())];
    const {before} = text, now = text.probs(edit);
    let [a, b] = (compare ?? []).map(word => tokenizer.forms(word)[0]);
    a ??= top(before, 1)[0];
    if (b === undefined || b === a) b = top(before, 2).find(id => id !== a);
    const d = model.n_embd, v = add(model.row('wte.weight', a).slice(), model.row('wte.weight', b), -1);  // E_a - E_b
    const alpha = k ? text.alpha() : [], rows = ids.map((id, j) => Array.from({length: k}, (_, l) =>
      [alpha[j * k + l], dot(edit.senses(id), v, d, l * d), edit.factor(id, j, l)]));  // adds their product
    const word = id => ({id, label: tokenizer.label(id), name: tokenizer.name(id), before: before[id], now: now[id]});
    return {dropped: all.length - ids.length, pieces: tokenizer.pieces(ids), names: ids.map(id => tokenizer.name(id)),
            rows, next: top(now, 10).map(word), a: word(a), b: word(b),
            likely: top(before, 12).map(id => tokenizer.name(id))};
  },

  cards({word, edits, n = 6}) {          // what each sense of a word raises and lowers most, at weight 1
    const id = tokenizer.forms(word)[0], C = editOf({replace: edits?.replace}).senses(id), d = model.n_embd;
    return Array.from({length: model.n_sense}, (_, l) => {
      const z = model.logits(C.subarray(l * d, (l + 1) * d));
      return [1, -1].map(sign => top(z, n, sign).map(id => [tokenizer.label(id), z[id]]));
    });
  },

  async generate({string, n = 40, seed = 0, temperature = 0.8, edits, run = 0}, tell) {  // as model.generate
    const draw = random(seed), own = new Text(model), edit = editOf(edits), {block_size} = model;
    let ids = idsOf(string).slice(-block_size), start = 0;
    latest = Math.max(latest, run);
    for (let from = ids.length; ids.length < from + n;) {
      if (ids.length - start > block_size) {
        start = ids.length - Math.max(1, block_size >> 1);
        edit.places.clear();             // of a text that begins elsewhere
      }
      const p = own.read(ids.slice(start)).probs(edit, temperature || 1);
      let next = p.indexOf(p.reduce((x, y) => x > y ? x : y));
      if (temperature) {
        let u = draw();
        next = p.findIndex(x => (u -= x) < 0);
      }
      ids = [...ids, next < 0 ? p.length - 1 : next];
      tell(tokenizer.decode(ids.slice(from)));
      await new Promise(resolve => setTimeout(resolve));
      if (ids.at(-1) === tokenizer.end || run < latest) break;  // another run has begun
    }
    return tokenizer.decode(ids);
  },
};

onmessage = async ({data: {n, ask, args}}) => {
  try {
    postMessage({n, answer: await answers[ask](args, part => postMessage({n, part}))});
  } catch (error) {
    postMessage({n, error: error.message});
  }
};
