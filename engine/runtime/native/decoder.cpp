// The whole forward pass of a dense decoder in one call, on a few threads of its own.
//
//     x += post(output(attention(rotate(norm(q)), rotate(norm(k)), v)))     q, k, v = qkv(norm(x))
//     x += post(down(act(gate) * up))                                       gate, up = gate_up(norm(x))
//
// where a model has these norms; an MLP without a gate is down(act(up)). In some models what is attended is multiplied
// by sigmoid(gate), and some layers have a delta net instead (delta_net.h).
//
// It is engine/runtime/reference/torch_decoder.py again, without an interpreter between two operations: a step of a small model,
// or of a large one with few rows, is some two hundred loops too short to be called one by one.
//
// The residual x is float32; what is multiplied is rounded to the element type just before. All loops
// share their items among the pool's threads; no item reads what another of the same loop writes.
//
// The bits of a token depend on its sequence alone: not on the rest of the step, on how a prompt is cut into chunks,
// on pages, slots or threads. Products (gemm.h, int8.h, tiles.h), attention (attention.h) and states (delta_net.h) each
// have one order of summation, whatever the number of rows, and all else is computed token by token. What a state sums
// up over a sequence relies on it.
//
// The interface is C, with plain pointers. The caller has checked all shapes. No exception crosses it: where memory
// or a thread is not to be had, a function returns NO_MEMORY, or no model. Every call on one model comes from one
// thread at a time.

#include <algorithm>
#include <atomic>
#include <cassert>
#include <new>
#include <utility>

#include "attention.h"
#include "delta_net.h"
#include "int8.h"
#include "pool.h"
#include "sampling.h"

namespace penstock {

extern "C" {

struct PenstockShape {
  int64_t vocab, hidden, inner, layers, heads, kv_heads, head_dim, page_size;
  float norm_eps, scale;  // of attention
  float embed_scale, residual_scale, logit_scale, logit_softcap;  // 0: no cap
  float temper_beta;  // queries grow by 1 + beta * ln(1 + floor(position / temper_len)); 0: they do not
  int64_t temper_len;
  int64_t key_heads, value_heads, key_dim, value_dim, kernel;  // of delta nets
  int32_t act, gated, qk_norm, output_gate, centred, parallel, bf16, quantised;
};

// What a step computes. Row i is tokens [starts[i], starts[i] + lengths[i]) of a slot, packed one after
// another; a slot's tokens are tokens[slot * tokens_stride ...], its pages tables[slot * tables_stride ...].
struct PenstockStep {
  int64_t rows;
  const int64_t *slots, *starts, *lengths;
  int64_t tokens_stride, tables_stride;
  const int32_t *tokens, *tables;
  // Of a model with states, or null: row i goes on from the state at places[i], which becomes its own. `behind`, null
  // or of each packed token: where a row that verifies leaves the state behind it instead; -1 in other rows.
  const int64_t *places, *behind;
};

// Rows of logits, each drawn by its slot's parameters at its position.
struct PenstockDraw {
  int64_t count, vocab;
  const int64_t *rows, *slots, *positions;  // [count]
  const float* logits;  // [rows][vocab]
  const float *temperature, *min_p;  // [slots], as all that follow
  const int64_t* top_k;
  const double* top_p;
  const uint64_t* seed;
  // [count], each null or mask_len bytes, by which bit t says whether token t may be drawn; or null
  const uint8_t* const* masks;
  int64_t mask_len;
};

// Adds up x [count] over all ranks, in place. Returns 0, or anything else where that is not to be had.
typedef int32_t (*PenstockSum)(float* x, int64_t count);

enum PenstockLinear : int32_t { QKV, OUTPUT, GATE_UP, DOWN, DELTA, LM_HEAD };
enum PenstockVector : int32_t {
  ATTENTION_NORM, ATTENTION_POST_NORM, MLP_NORM, MLP_POST_NORM, QK_NORM, DELTA_CONV, DELTA_RATE, DELTA_STEP_BIAS,
  DELTA_NORM, FINAL_NORM, VECTORS
};
enum PenstockAct : int32_t { SILU, GELU_TANH, RELU2 };
// Where queries and keys are normed: each head before it is rotated, or behind; all heads as one row, before.
enum PenstockQKNorm : int32_t { NOWHERE, HEADS, ROTATED_HEADS, WIDTH };
}

struct NotSummed {};

struct Model {
  virtual ~Model() = default;
  virtual void set_linear(int64_t layer, int32_t which, const void* weight, int64_t outputs, int64_t inputs,
                          const float* bias) = 0;
  virtual void forward(const PenstockStep& step, void* hidden) = 0;
  virtual void logits(const void* hidden, int64_t rows, float* out) = 0;
  virtual void draw(const PenstockDraw& draw, int64_t* out) = 0;

  PenstockSum add_up = nullptr;  // of a model that several ranks compute
  struct Layer {
    Linear linear[LM_HEAD];
    Buffer<float> vector[VECTORS];
    int64_t window = 0;
    const float *cosines = nullptr, *sines = nullptr;  // [positions][head_dim / 2]
    void *keys = nullptr, *values = nullptr;
    float* states = nullptr;  // of a delta net: [places][value_heads][key_dim][value_dim]
    void* past = nullptr;     // and its convolution's: [places][kernel - 1][channels]
  };
  std::vector<Layer> layers;
  Layer top;  // of which the final norm is used
  const void* embedding = nullptr;  // [vocab][hidden]; null: the rows of lm_head
};

template <class E>
class Decoder final : public Model {
  using T = typename E::T;
  static constexpr int per_word = E::PER_WORD;
  static constexpr int64_t ROWS = 96;  // of x, which a panel meets while both are cached
  static constexpr int64_t ROWS_MAX = ROWS + (BY_TILES<E> ? ROWS_AT_ONCE<E> : 0);  // see begin_of
  static constexpr int64_t ITEM_BYTES = 256 << 10, WRITTEN_TOKENS = 16;
  static constexpr int64_t WIDENED_ROWS_MIN = 2 * TILE_ROWS;  // fewer are a matter of reading the weights

 public:
  Decoder(const PenstockShape& shape, int threads)
      : shape_(shape),
        heads_{shape.heads, shape.kv_heads, shape.head_dim, shape.page_size, shape.scale},
        delta_{shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.kernel},
        pool_(threads),
        likeliest_(threads) {
    layers = std::vector<Layer>(shape.layers);
    const int64_t longest = std::max({shape.hidden, shape.inner, mixed_width()});
    for (int i = 0; i < threads; ++i) {
      scratch_.emplace_back(heads_);
      products_.emplace_back(std::max(ROWS_MAX, shape.key_dim) * PANEL);
      panels_.emplace_back(shape.quantised && BY_TILES<E> ? longest / per_word * PANEL : 0);
    }
  }

  void set_linear(int64_t layer, int32_t which, const void* weight, int64_t outputs, int64_t inputs,
                  const float* bias) override {
    Linear& linear = which == LM_HEAD ? lm_head_ : layers[layer].linear[which];
    linear.outputs = outputs;
    linear.words = inputs / per_word;
    linear.panels = (linear.outputs + PANEL - 1) / PANEL;
    const size_t padded = linear.panels * PANEL;
    const bool paired = which == GATE_UP && shape_.gated;
    if (shape_.quantised) {
      linear.quantised.reserve(padded * inputs);
      linear.scale.reserve(padded);
    } else {
      linear.weights.reserve(padded * linear.words);
    }
    if (bias) {
      linear.bias.reserve(padded);
      for (size_t place = 0; place < padded; ++place)
        linear.bias.get()[place] =
            int64_t(place) < linear.outputs ? bias[row_of(place, linear.outputs, paired)] : 0.0f;
    }
    pool_.each(linear.panels, [&](int, int64_t panel) {
      pack_panel<E>(linear, static_cast<const T*>(weight), panel, paired);
    });
  }

  void forward(const PenstockStep& step, void* hidden) override {
    prepare(step);
    embed();
    for (auto& layer : layers) {
      norm(layer, ATTENTION_NORM, normed_.get());
      if (layer.states)
        recall(layer);
      else
        look_back(layer);
      add_projected(layer, OUTPUT, attended_.get(), ATTENTION_POST_NORM);
      if (!shape_.parallel) norm(layer, MLP_NORM, normed_.get());
      project(layer.linear[GATE_UP], normed_.get(), tokens_, [&](int64_t token, int64_t place, const float* y) {
        activate(y, used(layer.linear[GATE_UP], place), gated_.get() + token * shape_.inner, place);
      });
      add_projected(layer, DOWN, gated_.get(), MLP_POST_NORM);
    }
    norm(top, FINAL_NORM, static_cast<T*>(hidden));
  }

  void logits(const void* hidden, int64_t rows, float* out) override {
    project(lm_head_, static_cast<const T*>(hidden), rows, [&](int64_t row, int64_t place, const float* y) {
      float* to = out + row * shape_.vocab + place;
      const int count = used(lm_head_, place);
      if (shape_.logit_softcap == 0.0f && shape_.logit_scale == 1.0f) {
        std::memcpy(to, y, count * sizeof(float));
        return;
      }
      for (int n = 0; n < PANEL; n += LANES) {
        float capped[LANES];
        const float cap = shape_.logit_softcap;
        const vf scaled = load<vf>(y + n) * shape_.logit_scale;
        store(capped, cap == 0.0f ? scaled : tanh_of(scaled / cap) * cap);
        for (int i = 0; i < LANES && n + i < count; ++i) to[n + i] = capped[i];
      }
    });
  }

  void draw(const PenstockDraw& all, int64_t* out) override {
    std::atomic<bool> lacks_memory{false};
    pool_.each(all.count, [&](int worker, int64_t i) {
      try {
        out[i] = drawn(all, worker, i);
      } catch (const std::bad_alloc&) {
        lacks_memory.store(true);
      }
    });
    if (lacks_memory) throw std::bad_alloc();
  }

 private:
  int64_t drawn(const PenstockDraw& all, int worker, int64_t i) {
    const Mask mask{all.masks ? all.masks[i] : nullptr, all.mask_len};
    const LogitsRow logits(all.logits + all.rows[i] * all.vocab, all.vocab, mask);
    const int64_t slot = all.slots[i], top_k = all.top_k[slot];
    const float temperature = all.temperature[slot], min_p = all.min_p[slot];
    const double top_p = all.top_p[slot];
    if (!logits.sound()) return NUMERIC_FAILURE;
    if (logits.empty()) return 0;
    if (temperature == 0.0f) return logits.argmax();
    const double u = uniform(all.seed[slot], uint64_t(all.positions[i]));
    const bool whole = top_k >= all.vocab && top_p >= 1.0;
    return whole ? logits.draw(temperature, min_p, u)
                 : likeliest_[worker].draw(logits, temperature, top_k, top_p, min_p, u);
  }

  bool has_post_norms() const { return layers[0].vector[ATTENTION_POST_NORM].get(); }
  int64_t qkv_width() const {
    return (shape_.heads * (shape_.output_gate ? 2 : 1) + 2 * shape_.kv_heads) * shape_.head_dim;
  }
  int64_t mixed_width() const { return std::max(shape_.heads * shape_.head_dim, delta_.values()); }
  static int used(const Linear& w, int64_t place) { return int(std::min<int64_t>(PANEL, w.outputs - place)); }

  // normed_ -> attended_, over the keys and values of the tokens before, which these join.
  void look_back(const Layer& layer) {
    project(layer.linear[QKV], normed_.get(), tokens_, [&](int64_t token, int64_t place, const float* y) {
      std::memcpy(qkv_.get() + token * qkv_width() + place, y, used(layer.linear[QKV], place) * sizeof(float));
    });
    each_span(written_, 1, [&](int, const Span& span, int64_t) { rotate_and_write(layer, span); });
    const int64_t gates = (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim;
    each_span(attended_spans_, shape_.kv_heads, [&](int worker, const Span& span, int64_t kv_head) {
      attend<E>(heads_, span, kv_head, layer.window, q_.get(), static_cast<const T*>(layer.keys),
                static_cast<const T*>(layer.values), shape_.output_gate ? qkv_.get() + gates : nullptr, qkv_width(),
                attended_.get(), scratch_[worker]);
    });
  }

  // normed_ -> attended_, by a delta net, whose states go on to the rows' last tokens.
  //
  // The convolution's inputs are rounded, as a later chunk finds them so. The others go to gates_: z, b, a.
  void recall(const Layer& layer) {
    const Linear& linear = layer.linear[DELTA];
    const int64_t channels = delta_.channels();
    project(linear, normed_.get(), tokens_, [&](int64_t token, int64_t place, const float* y) {
      for (int n = 0; n < used(linear, place); n += LANES) {
        const int64_t at = place + n;
        if (at < channels)
          E::narrow(inputs_.get() + token * channels + at, load<vf>(y + n));
        else
          store(gates_.get() + token * gates_width() + at - channels, load<vf>(y + n));
      }
    });
    each_span(written_, 3, [&](int, const Span& span, int64_t part) { convolve(layer, span, part); });
    // A decode's time is that of reading states and writing them, so a head's is asked for as a whole.
    each_span(rows_, delta_.value_heads, [&](int worker, const Span& row, int64_t head) {
      if (head == 0) keep_past(layer, row);
      prefetch(places_of(layer, row, head).at(row.state), delta_.state() * sizeof(float));
      for (int64_t column = 0; column < delta_.value_dim; column += COLUMNS)
        recur(layer, row, head, column, products_[worker].get());
    });
    each_of(tokens_, [&](int64_t token) { gate(layer, token); });
  }

  // A part of the channels: queries, keys, or values, with which b and a become strength and kept.
  void convolve(const Layer& layer, const Span& span, int64_t part) {
    const DeltaShape& s = delta_;
    const int64_t first = part * s.keys(), count = part == 2 ? s.values() : s.keys();
    for (int64_t i = 0; i < span.count; ++i) {
      const int64_t token = span.token + i;
      const T* taps[TAPS_MAX];
      for (int64_t tap = 0; tap < s.kernel; ++tap) {
        const int64_t back = s.kernel - 1 - tap;
        taps[tap] = back <= span.earlier + i ? inputs_.get() + (token - back) * s.channels()
                                             : past_at(layer, span.state) + (tap + span.earlier + i) * s.channels();
      }
      float* out = convolved_.get() + token * s.channels();
      penstock::convolve<E>(s, taps, layer.vector[DELTA_CONV].get(), first, count, out);
      if (part == 2) {
        weigh(layer, gates_.get() + token * gates_width() + s.values());
        continue;
      }
      const float scale = part == 0 ? 1.0f / std::sqrt(float(s.key_dim)) : 1.0f;
      for (int64_t d = 0; d < count; d += s.key_dim) of_length_one(out + first + d, s.key_dim, scale);
    }
  }

  // b and a of a token become strength and kept.
  void weigh(const Layer& layer, float* strength) {
    const int64_t heads = delta_.value_heads;
    const float *rate = layer.vector[DELTA_RATE].get(), *bias = layer.vector[DELTA_STEP_BIAS].get();
    for (int64_t head = 0; head < heads; ++head) {
      float& kept = strength[heads + head];
      strength[head] = sigmoid(strength[head]);
      kept = std::exp(-rate[head] * softplus(kept + bias[head]));
    }
  }

  // The inputs of the row's last tokens, for its next ones. Where it verifies, of each token's: those behind its first
  // may overwrite what the others find, so they come last.
  void keep_past(const Layer& layer, const Span& row) {
    if (!row.behind) return keep_past(layer, row, row.count, row.state);
    for (int64_t count = row.count; count > 0; --count) keep_past(layer, row, count, row.behind[count - 1]);
  }

  void keep_past(const Layer& layer, const Span& row, int64_t count, int64_t place) {
    const int64_t kept = delta_.kernel - 1, size = delta_.channels();
    T *past = past_at(layer, row.state), *to = past_at(layer, place);
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t from = count - kept + i;
      std::memcpy(to + i * size, from < 0 ? past + (kept + from) * size : inputs_.get() + (row.token + from) * size,
                  size * sizeof(T));
    }
  }

  T* past_at(const Layer& layer, int64_t place) const { return static_cast<T*>(layer.past) + place * delta_.past(); }

  DeltaPlaces places_of(const Layer& layer, const Span& row, int64_t head) const {
    return {layer.states + head * delta_.state(), delta_.value_heads * delta_.state(), row.state, row.behind};
  }

  void recur(const Layer& layer, const Span& row, int64_t head, int64_t column, float* block) {
    const DeltaShape& s = delta_;
    const float* convolved = convolved_.get() + row.token * s.channels();
    const float* strength = gates_.get() + row.token * gates_width() + s.values() + head;
    const int64_t key = head / s.group() * s.key_dim, value = head * s.value_dim + column;
    const DeltaTokens tokens{row.count, s.channels(), gates_width(), s.values(),
                             std::min(COLUMNS, s.value_dim - column), convolved + key, convolved + s.keys() + key,
                             convolved + 2 * s.keys() + value, strength + s.value_heads, strength,
                             recalled_.get() + row.token * s.values() + value};
    DeltaPlaces places = places_of(layer, row, head);
    places.states += column;
    penstock::recur(s, places, block, tokens);
  }

  // norm(recalled) * silu(z), each head by itself; this norm is never centred.
  void gate(const Layer& layer, int64_t token) {
    const float *recalled = recalled_.get() + token * delta_.values(), *z = gates_.get() + token * gates_width();
    const float* weight = layer.vector[DELTA_NORM].get();
    const int64_t dim = delta_.value_dim;
    for (int64_t at = 0; at < delta_.values(); at += dim) {
      vf squares{};
      for (int64_t d = at; d < at + dim; d += LANES) squares += load<vf>(recalled + d) * load<vf>(recalled + d);
      const float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + shape_.norm_eps);
      for (int64_t d = 0; d < dim; d += LANES) {
        const vf normed = load<vf>(recalled + at + d) * scale * load<vf>(weight + d);
        E::narrow(attended_.get() + token * delta_.values() + at + d, normed * silu(load<vf>(z + at + d)));
      }
    }
  }

  int64_t gates_width() const { return (delta_.outputs() + PANEL - 1) / PANEL * PANEL - delta_.channels(); }

  // Room for the step's tokens, and its rows cut into spans: short ones to write, blocks of queries to attend.
  void prepare(const PenstockStep& step) {
    written_.clear();
    attended_spans_.clear();
    rows_.clear();
    token_ids_.clear();
    tokens_ = 0;
    for (int64_t row = 0; row < step.rows; tokens_ += step.lengths[row++]) {
      const int64_t slot = step.slots[row], start = step.starts[row], length = step.lengths[row];
      const int32_t* first = step.tokens + slot * step.tokens_stride + start;
      token_ids_.insert(token_ids_.end(), first, first + length);
      const int64_t* behind = step.behind && step.behind[tokens_] >= 0 ? step.behind + tokens_ : nullptr;
      const Span whole{step.tables + slot * step.tables_stride, start, tokens_, length, 0, 0,
                       step.places ? step.places[row] : 0, behind};
      rows_.push_back(whole);
      cut(whole, WRITTEN_TOKENS, written_);
      cut(whole, heads_.block_tokens(), attended_spans_);
    }
    x_.reserve(tokens_ * shape_.hidden);
    normed_.reserve(tokens_ * shape_.hidden);
    qkv_.reserve(tokens_ * qkv_width());
    if (add_up || has_post_norms()) added_.reserve(tokens_ * shape_.hidden);
    q_.reserve(tokens_ * shape_.heads * shape_.head_dim);
    attended_.reserve(tokens_ * mixed_width());
    if (delta_.value_heads) {
      inputs_.reserve(tokens_ * delta_.channels());
      gates_.reserve(tokens_ * gates_width());
      convolved_.reserve(tokens_ * delta_.channels() + COLUMNS);
      recalled_.reserve(tokens_ * delta_.values());
    }
    gated_.reserve(tokens_ * shape_.inner);
  }

  static void cut(const Span& whole, int64_t size, std::vector<Span>& spans) {
    for (int64_t i = 0; i < whole.count; i += size) {
      const int64_t count = std::min(size, whole.count - i);
      spans.push_back({whole.table, whole.position + i, whole.token + i, count, i, whole.count - i - count, whole.state,
                       whole.behind});
    }
  }

  // The last spans of a row see the most, so they go first.
  template <class Body>
  void each_span(const std::vector<Span>& spans, int64_t parts, Body&& body) {
    pool_.each(int64_t(spans.size()) * parts, [&](int worker, int64_t item) {
      body(worker, spans[spans.size() - 1 - item / parts], item % parts);
    });
  }

  // each(token, place, y) for every 32 outputs [place, place + 32) of x W^T + b.
  //
  // All blocks of x meet some panels before the next ones are read.
  template <class Each>
  void project(const Linear& w, const T* x, int64_t tokens, Each&& each) {
    const int64_t blocks = (tokens + ROWS - 1) / ROWS;
    const int64_t fair = std::max<int64_t>(1, w.panels / (4 * pool_.threads()));
    const int64_t group = std::min(fair, std::max<int64_t>(1, ITEM_BYTES / w.panel_bytes(per_word)));
    const int64_t groups = (w.panels + group - 1) / group;
    const bool widens = E::APART && !in_bytes(w) && tokens > WIDENED_ROWS_MIN;
    if (in_bytes(w)) quantise(x, tokens, w.words * per_word);
    if (widens) widen(x, tokens, w.words * per_word);
    pool_.each(blocks * groups, [&](int worker, int64_t item) {
      const int64_t block = item % blocks, first = begin_of(block, blocks, tokens);
      const int64_t rows = begin_of(block + 1, blocks, tokens) - first;
      assert(rows <= ROWS_MAX);
      float* y = products_[worker].get();
      Tiles unit;
      for (int64_t panel = item / blocks * group, i = 0; i < group && panel < w.panels; ++panel, ++i) {
        if (in_bytes(w)) {
          const uint8_t* quads = w.quantised.get() + panel * w.panel_bytes(per_word);
          multiply_int8(quants_, first, rows, reinterpret_cast<const uint32_t*>(quads), y);
        } else if (widens) {
          const uint32_t* words = w.weights.get() + panel * w.words * PANEL;
          multiply_widened(widened_.get() + first * w.words * per_word, rows, words, w.words, y, unit);
        } else {
          const uint32_t* a = reinterpret_cast<const uint32_t*>(x) + first * w.words;
          multiply_panel<E>(w, panel, a, rows, y, panels_[worker].get(), unit);
        }
        for (int64_t row = 0; row < rows; ++row) {
          finish(w, panel * PANEL, y + row * PANEL);
          each(first + row, panel * PANEL, y + row * PANEL);
        }
      }
    });
  }

  // Multiplied as int8.h does.
  static bool in_bytes(const Linear& w) { return !BY_TILES<E> && w.quantised; }

  void quantise(const T* x, int64_t tokens, int64_t columns) {
    quants_.reserve(tokens, columns);
    each_of(tokens, [&](int64_t token) { quants_.set<E>(token, x + token * columns); });
  }

  void widen(const T* x, int64_t tokens, int64_t columns) {
    widened_.reserve(tokens * columns);
    each_of(tokens, [&](int64_t token) {
      for (int64_t i = token * columns; i < (token + 1) * columns; ++i) widened_.get()[i] = E::widen(x[i]);
    });
  }

  // Blocks are of one size: a last one of a few rows would read the weights for little. A matrix unit takes so
  // many rows at once, or fewer in the same time.
  static int64_t begin_of(int64_t block, int64_t blocks, int64_t tokens) {
    const int64_t begin = tokens * block / blocks;
    return BY_TILES<E> && block < blocks ? begin / ROWS_AT_ONCE<E> * ROWS_AT_ONCE<E> : begin;
  }

  static void finish(const Linear& w, int64_t place, float* y) {
    for (int n = 0; n < PANEL; n += LANES) {
      if (w.scale) store(y + n, load<vf>(y + n) * load<vf>(w.scale.get() + place + n));
      if (w.bias) store(y + n, load<vf>(y + n) + load<vf>(w.bias.get() + place + n));
    }
  }

  void activate(const float* y, int count, T* to, int64_t place) const {
    if (!shape_.gated) {
      for (int n = 0; n < count; n += LANES) E::narrow(to + place + n, activated(load<vf>(y + n)));
      return;
    }
    for (int n = 0; n < count; n += 2 * LANES)
      E::narrow(to + (place + n) / 2, activated(load<vf>(y + n)) * load<vf>(y + n + LANES));
  }

  vf activated(vf x) const {
    return shape_.act == SILU ? silu(x) : shape_.act == GELU_TANH ? gelu_tanh(x) : relu2(x);
  }

  // x_ grows by what `from` becomes, over all ranks.
  void add_projected(const Layer& layer, PenstockLinear which, const T* from, PenstockVector post) {
    const Linear& w = layer.linear[which];
    const float* weight = layer.vector[post].get();
    const float scale = shape_.residual_scale;
    if (!weight && !add_up) {
      project(w, from, tokens_, [&](int64_t token, int64_t place, const float* y) {
        float* x = x_.get() + token * shape_.hidden + place;
        for (int n = 0; n < used(w, place); ++n) x[n] += scale * y[n];
      });
      return;
    }
    project(w, from, tokens_, [&](int64_t token, int64_t place, const float* y) {
      std::memcpy(added_.get() + token * shape_.hidden + place, y, used(w, place) * sizeof(float));
    });
    if (add_up && add_up(added_.get(), tokens_ * shape_.hidden) != 0) throw NotSummed();
    each_of(tokens_, [&](int64_t token) {
      float *x = x_.get() + token * shape_.hidden, *y = added_.get() + token * shape_.hidden;
      if (!weight) {
        for (int64_t i = 0; i < shape_.hidden; i += LANES) store(x + i, load<vf>(x + i) + load<vf>(y + i) * scale);
        return;
      }
      const auto [mean, inverse] = moments(y, shape_.hidden);
      const float factor = inverse * scale;
      for (int64_t i = 0; i < shape_.hidden; i += LANES)
        store(x + i, load<vf>(x + i) + (load<vf>(y + i) - mean) * factor * load<vf>(weight + i));
    });
  }

  template <class Body>
  void each_of(int64_t count, Body&& body) {
    pool_.each((count + 7) / 8, [&](int, int64_t item) {
      for (int64_t i = item * 8; i < std::min(count, item * 8 + 8); ++i) body(i);
    });
  }

  void embed() {
    each_of(tokens_, [&](int64_t token) {
      const int64_t id = token_ids_[token];
      float* x = x_.get() + token * shape_.hidden;
      if (embedding) {
        const T* row = static_cast<const T*>(embedding) + id * shape_.hidden;
        for (int64_t i = 0; i < shape_.hidden; ++i) x[i] = E::widen(row[i]) * shape_.embed_scale;
        return;
      }
      const uint32_t* lane = lm_head_.weights.get() + id / PANEL * lm_head_.words * PANEL + id % PANEL;
      for (int64_t i = 0; i < shape_.hidden; ++i) {
        T element[per_word];
        std::memcpy(element, lane + i / per_word * PANEL, 4);
        x[i] = E::widen(element[i % per_word]) * shape_.embed_scale;
      }
    });
  }

  // Rounded, and normed where there is such a norm.
  void norm(const Layer& layer, PenstockVector which, T* out) {
    const int64_t hidden = shape_.hidden;
    const float* weight = layer.vector[which].get();
    each_of(tokens_, [&](int64_t token) {
      const float* x = x_.get() + token * hidden;
      if (!weight) {
        for (int64_t i = 0; i < hidden; i += LANES) E::narrow(out + token * hidden + i, load<vf>(x + i));
        return;
      }
      const auto [mean, scale] = moments(x, hidden);
      for (int64_t i = 0; i < hidden; i += LANES)
        E::narrow(out + token * hidden + i, (load<vf>(x + i) - mean) * scale * load<vf>(weight + i));
    });
  }

  // What a norm takes from x, 0 unless it is centred, and what it multiplies with.
  std::pair<float, float> moments(const float* x, int64_t n) const {
    float mean = 0.0f;
    if (shape_.centred) {
      vf total{};
      for (int64_t i = 0; i < n; i += LANES) total += load<vf>(x + i);
      mean = sum(total) / float(n);
    }
    vf squares{};
    for (int64_t i = 0; i < n; i += LANES) squares += (load<vf>(x + i) - mean) * (load<vf>(x + i) - mean);
    return {mean, 1.0f / std::sqrt(sum(squares) / float(n) + shape_.norm_eps)};
  }

  void rotate_and_write(const Layer& layer, const Span& span) {
    const int64_t dim = shape_.head_dim, heads = shape_.heads, kv_heads = shape_.kv_heads, size = shape_.page_size;
    for (int64_t i = 0; i < span.count; ++i) {
      const int64_t token = span.token + i, position = span.position + i, offset = position % size;
      float* q = qkv_.get() + token * qkv_width();
      const float* weights = layer.vector[QK_NORM].get();
      if (shape_.qk_norm == WIDTH) {
        norm_row(q, weights, heads * dim);
        norm_row(q + heads * dim, weights + heads * dim, kv_heads * dim);
      }
      for (int64_t head = 0; head < heads + kv_heads; ++head) {
        const float* own = weights + (head < heads ? 0 : dim);
        if (shape_.qk_norm == HEADS) norm_row(q + head * dim, own, dim);
        rotate(layer, q + head * dim, position);
        if (shape_.qk_norm == ROTATED_HEADS) norm_row(q + head * dim, own, dim);
      }
      if (shape_.temper_beta != 0.0f) {
        const float factor = 1.0f + shape_.temper_beta * std::log1p(float(position / shape_.temper_len));
        for (int64_t d = 0; d < heads * dim; ++d) q[d] *= factor;
      }
      for (int64_t d = 0; d < heads * dim; d += LANES) E::narrow(q_.get() + token * heads * dim + d, load<vf>(q + d));
      const bool led = i + span.earlier > 0, follows = i + 1 < span.count + span.later;
      for (int64_t head = 0; head < kv_heads; ++head) {
        const int64_t at = (span.table[position / size] * kv_heads + head) * heads_.tile_elements();
        const float* value = q + (heads + kv_heads + head) * dim;
        write_key<E>(heads_, static_cast<T*>(layer.keys) + at, offset, q + (heads + head) * dim);
        if (per_word == 2 && offset % 2 && led) continue;  // the token before has written it
        write_value<E>(heads_, static_cast<T*>(layer.values) + at, offset, value, follows ? value + qkv_width() : nullptr);
      }
    }
  }

  void norm_row(float* x, const float* weights, int64_t n) const {
    const auto [mean, scale] = moments(x, n);
    for (int64_t d = 0; d < n; ++d) x[d] = (x[d] - mean) * (scale * weights[d]);
  }

  // One head [head_dim], turned by its position.
  void rotate(const Layer& layer, float* x, int64_t position) const {
    const int64_t half = shape_.head_dim / 2;
    const float *cosine = layer.cosines + position * half, *sine = layer.sines + position * half;
    for (int64_t d = 0; d < half; ++d) {
      const float first = x[d], second = x[d + half];
      x[d] = first * cosine[d] - second * sine[d];
      x[d + half] = second * cosine[d] + first * sine[d];
    }
  }

  const PenstockShape shape_;
  const AttentionShape heads_;
  const DeltaShape delta_;
  Pool pool_;
  std::vector<Likeliest> likeliest_;  // one for each thread
  Linear lm_head_;
  int64_t tokens_ = 0;
  std::vector<int32_t> token_ids_;
  std::vector<Span> rows_, written_, attended_spans_;
  Buffer<float> x_, qkv_, added_;
  Buffer<T> normed_, q_, attended_, gated_;
  Buffer<float> widened_;  // what is multiplied, where that is worth it
  Buffer<T> inputs_;  // of delta nets, as the three below: what is convolved
  Buffer<float> gates_, convolved_, recalled_;
  Quants quants_;  // what is multiplied with int8
  std::vector<AttentionScratch<E>> scratch_;  // by worker, as the two below
  std::vector<Buffer<float>> products_;
  std::vector<Buffer<uint32_t>> panels_;
};

constexpr int32_t DONE = 0, NO_MEMORY = -1, NOT_SUMMED = -2;

template <class Work>
int32_t guarded(Work&& work) noexcept {
  try {
    work();
    return DONE;
  } catch (const NotSummed&) {
    return NOT_SUMMED;
  } catch (...) {  // std::bad_alloc, or the standard library's words for a size that none could have
    return NO_MEMORY;
  }
}

// What Python calls, and all that the linker sees (build.py).
#pragma GCC visibility push(default)
extern "C" {

const char* penstock_isa() { return PENSTOCK_ISA; }

Model* penstock_new(const PenstockShape* shape, int32_t threads) {
  Model* model = nullptr;
  guarded([&] {
    if (shape->bf16)
      model = new Decoder<Bf16>(*shape, threads);
    else
      model = new Decoder<Fp32>(*shape, threads);
  });
  return model;
}

void penstock_delete(Model* model) { delete model; }

// weight [outputs][inputs] of the element type, copied; bias float32 or null, copied.
int32_t penstock_set_linear(Model* model, int64_t layer, int32_t which, const void* weight, int64_t outputs,
                            int64_t inputs, const float* bias) {
  return guarded([&] { model->set_linear(layer, which, weight, outputs, inputs, bias); });
}

// float32, copied. QK_NORM: [2][head_dim], the queries' and the keys'. DELTA_CONV: [kernel][channels].
int32_t penstock_set_vector(Model* model, int64_t layer, int32_t which, const float* values, int64_t count) {
  return guarded([&] {
    Buffer<float>& own = (which == FINAL_NORM ? model->top : model->layers[layer]).vector[which];
    own.reserve(count);
    std::copy(values, values + count, own.get());
  });
}

// One layer's pages, and how many of the latest tokens a token sees there (0: all). Borrowed.
void penstock_set_cache(Model* model, int64_t layer, void* keys, void* values, int64_t window) {
  model->layers[layer].keys = keys;
  model->layers[layer].values = values;
  model->layers[layer].window = window;
}

// What a delta net's layer keeps at each place: states [places][value_heads][key_dim][value_dim], and of the element type
// past [places][kernel - 1][channels]. Borrowed.
void penstock_set_states(Model* model, int64_t layer, float* states, void* past) {
  model->layers[layer].states = states;
  model->layers[layer].past = past;
}

// This model is a rank's part: the outputs of `OUTPUT` and `DOWN` are added up by `sum`, in the thread that asks.
void penstock_set_sum(Model* model, PenstockSum sum) { model->add_up = sum; }

// Borrowed. `embedding` may be null, and is then read from lm_head, which must not be quantised.
void penstock_set_embedding(Model* model, const void* embedding) { model->embedding = embedding; }

// Of all positions, for one layer. Borrowed.
void penstock_set_angles(Model* model, int64_t layer, const float* cosines, const float* sines) {
  model->layers[layer].cosines = cosines;
  model->layers[layer].sines = sines;
}

// hidden [T][hidden], of the element type, after the last norm.
int32_t penstock_forward(Model* model, const PenstockStep* step, void* hidden) {
  return guarded([&] { model->forward(*step, hidden); });
}

// hidden [rows][hidden] -> out [rows][vocab].
int32_t penstock_logits(Model* model, const void* hidden, int64_t rows, float* out) {
  return guarded([&] { model->logits(hidden, rows, out); });
}

// A token for each row of `draw`, or NUMERIC_FAILURE.
int32_t penstock_draw(Model* model, const PenstockDraw* draw, int64_t* out) {
  return guarded([&] { model->draw(*draw, out); });
}
}
#pragma GCC visibility pop

}  // namespace penstock
