// SPDX-License-Identifier: Apache-2.0
#include "training.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "check.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zenflow_test {

using namespace zenflow;

namespace {

// Until its end this thread flushes denormals to zero, as torch.set_flush_denormal(True) makes it.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  explicit FlushDenormals(bool flush) : before_(_mm_getcsr()) { _mm_setcsr(flush ? before_ | 0x8040u : before_); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  explicit FlushDenormals(bool) {}
#endif
};

class Digest {
 public:
  void add(uint64_t bits) { value_ = (value_ ^ bits) * 0x9e3779b97f4a7c15u ^ (value_ >> 29); }
  void add_array(DType dtype, const void* array, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_at(dtype, array, i);
      add(is_nan_pattern(dtype, bits) ? 0x7fffffffu : bits);
    }
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 1;
};

uint64_t digest_of(const TensorView& matrix) {
  Digest digest;
  std::vector<char> row(static_cast<size_t>(matrix.shape().columns * item_size(matrix.dtype())));
  for (int64_t r = 0; r < matrix.shape().rows; ++r) {
    matrix.gather(r, nullptr, matrix.shape().columns, row.data());
    digest.add_array(matrix.dtype(), row.data(), matrix.shape().columns);
  }
  return digest.value();
}

int64_t selected_count(double ratio, int64_t columns) {
  if (ratio == 0) return 0;
  return std::min(columns,
                  std::max<int64_t>(1, static_cast<int64_t>(std::floor(ratio * static_cast<double>(columns) + 0.5))));
}

// As contiguous, with the last dimension outermost.
std::vector<int64_t> transposed_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t stride = 1;
  for (size_t d = 0; d < sizes.size(); ++d) strides[d] = std::exchange(stride, stride * sizes[d]);
  return strides;
}

void fill(Random& random, DType dtype, std::vector<char>& memory, float scale, int columns) {
  const int64_t count = static_cast<int64_t>(memory.size()) / item_size(dtype);
  with_dtype(dtype, [&]<DType D>() {
    auto* out = reinterpret_cast<typename BitsOf<D>::type*>(memory.data());
    // Columns of different weight, so that selections differ from each other and ties are broken.
    for (int64_t i = 0; i < count; ++i)
      out[i] = round_to<D>(random.uniform() * scale * static_cast<float>(i % columns + 1));
  });
}

}  // namespace

Script random_script(uint64_t seed, int events) {
  Random random(seed);
  Script script;
  Settings& s = script.settings;
  s.mean = random.chance(40);
  s.update_interval = random.between(1, 5);
  s.update_delay = random.chance(20) ? 0 : random.between(1, s.update_interval);
  s.lookahead = random.chance(70) ? static_cast<double>(s.update_delay) : random.one_of({0.0, 0.5});
  script.select_interval = s.update_interval * random.between(1, 3);
  script.warm_up = random.chance(30) ? random.between(1, 3) : 0;
  script.max_grad_norm = random.chance(40) ? random.one_of({1.0, 1e4}) : 0.0;
  script.hashes_steps = random.chance(40);
  s.automatic = s.update_delay <= 1 && random.chance(40);
  script.vote_share = random.one_of({0.3, 0.6, 1.0});
  const int late = static_cast<int>(random.between(0, 7));  // parameter 3 has no gradient before this event
  for (int i = 0; i < events; ++i) {
    Event e{random.chance(65) ? Act::kStep
                              : random.one_of({Act::kSynchronize, Act::kFlush, Act::kSettled, Act::kExport,
                                               Act::kRestart, Act::kRestart, Act::kMove}),
            random.bits()};
    if (random.chance(40)) e.edited = random.chance(50) ? 0 : static_cast<int>(random.between(0, kParameters - 1));
    e.tracked = random.chance(60) || script.hashes_steps;
    e.transposed = random.chance(25);
    e.hashed = random.chance(30);
    // A step without the large parameters is quick, and so finds the host at work on the step before it.
    const int64_t kind = random.between(0, 9);
    for (int p = 0; p < kParameters; ++p) {
      const bool has = kind < 4 ? random.chance(90) : kind < 7 ? p == 1 : kind == 7 ? p == 0 : kind == 8 && p > 0;
      const int dtype = random.chance(90) ? p % 3 : static_cast<int>(random.between(0, 2));
      e.dtypes.push_back(has && (p != 3 || i >= late) ? dtype : -1);
    }
    script.events.push_back(std::move(e));
  }
  return script;
}

struct Training::Exported {
  std::vector<float> exp_avg, exp_avg_sq, master, window_sum;
  std::vector<char> last_written, pending_output;
  std::unique_ptr<bool[]> selected;
  std::vector<int32_t> column_steps;
  ImportedClock clock;
  int64_t selected_count = 0;

  FullState view() const {
    const auto data = [](const auto& v) {
      using T = typename std::remove_cvref_t<decltype(v)>::value_type;
      return v.empty() ? nullptr : const_cast<T*>(v.data());
    };
    return {data(exp_avg),        data(exp_avg_sq), data(master),     data(last_written),
            data(pending_output), selected.get(),   data(window_sum), data(column_steps)};
  }
};

Training::Training(const Script& script, const Variant& variant) : script_(script), variant_(variant) {
  make_tensors();
}

std::unique_ptr<Engine> Training::make_engine() {
  Settings settings = script_.settings;
  settings.stream = variant_.stream;
  auto engine = std::make_unique<Engine>(settings, variant_.threads, std::vector<int>(), variant_.threads);
  prepare(*engine);
  return engine;
}

void Training::make_tensors() {
  constexpr DType kF32 = DType::kFloat32, kBF16 = DType::kBFloat16, kF16 = DType::kFloat16;
  const auto tensor = [&](std::vector<int64_t> sizes, DType dtype, bool split, double ratio, float scale) {
    Tensor& t = tensors_.emplace_back();
    t.sizes = std::move(sizes);
    t.dtype = dtype;
    t.split = split;
    t.maximize = tensors_.size() % 3 == 0;
    t.topk_ratio = ratio;
    t.gradient_scale = scale;
    if (tensors_.size() % 2 == 0) t.strides = transposed_strides(t.sizes);
  };
  tensor({500, 240}, kBF16, true, 0.1, 1e-3f);
  tensor({20, 24}, kF16, true, 0.25, 1e-2f);
  tensor({16, 25, 50}, kF32, true, 0.04, 1e-20f);  // squares are denormal
  tensor({30, 20, 5, 7}, kBF16, true, 0.0, 1.0f);
  tensor({20000}, kF32, false, 1.0, 1e-3f);
  tensor({6, 10}, kF16, true, 1.0, 1e-3f);
  Random random(77);
  for (Tensor& t : tensors_) {
    t.weights.resize(static_cast<size_t>(t.count() * item_size(t.dtype)));
    fill(random, t.dtype, t.weights, 0.1f, 3);
  }
}

std::vector<uint64_t> Training::run() {
  engine_ = make_engine();
  for (const Event& event : script_.events) {
    play(event);
    if (variant_.patient) engine_->adopt_edits({}), engine_->show_settled({});  // these wait, and do no more
    if (event.hashed) digests_.push_back(weights_digest());
  }
  digests_.push_back(weights_digest());
  digests_.push_back(state_digest());
  for (const Tensor& t : tensors_) {
    if (!knows_moments() || t.index < 0) continue;
    const Exported e = export_alone(t);
    for (size_t i = 0; i < t.exp_avg.size(); ++i) {
      CHECK(same_bits(DType::kFloat32, bits_from_float(e.exp_avg[i]), bits_from_float(t.exp_avg[i])));
      CHECK(same_bits(DType::kFloat32, bits_from_float(e.exp_avg_sq[i]), bits_from_float(t.exp_avg_sq[i])));
    }
  }
  return digests_;
}

void Training::play(const Event& event) {
  if (event.edited >= 0) edit(event.edited, event.seed, event.tracked);
  if (event.act == Act::kStep) return step(event);
  if (event.act == Act::kRestart || event.act == Act::kMove) {
    if (!variant_.restarts) return;
    return event.act == Act::kRestart ? restart() : move(tensors_[event.seed % kParameters]);
  }

  const FlushDenormals mode(variant_.flushes_denormals);
  if (event.act == Act::kSynchronize) call_on_weights(&Engine::synchronize);
  if (event.act == Act::kFlush) call_on_weights(&Engine::flush);
  if (event.act == Act::kExport) state_digest();
  if (event.act == Act::kSettled) {
    if (event.seed % 3 != 0) call_on_weights(&Engine::show_settled);
    if (event.seed % 2 == 0) edit(static_cast<int>(event.seed / 2 % kParameters), event.seed, true);
    call_on_weights(&Engine::show_training);
  }
  for (Tensor& t : tensors_) t.suspect = false;
}

// As `p.data = q` does: a few other values, at another address.
void Training::edit(int parameter, uint64_t seed, bool tracked) {
  Tensor& t = tensors_[static_cast<size_t>(parameter)];
  Random random(seed ^ 1);
  std::vector<char> other = t.weights;
  for (int64_t i = random.between(1, 60); i > 0; --i) {
    store_rounded(t.dtype, other.data(), random.between(0, t.count() - 1), random.uniform());
  }
  t.weights.swap(other);
  t.suspect = t.suspect || tracked;
}

std::vector<Operand> Training::operands() {
  std::vector<Operand> all;
  for (Tensor& t : tensors_) {
    if (t.index < 0) continue;
    Operand& o = all.emplace_back();
    o.parameter = &engine_->parameter(t.index);
    o.weight = engine_->view(t.index, t.weights.data(), std::nullopt, t.strides);
    o.suspect = t.suspect;
    o.maximize = t.maximize;
  }
  return all;
}

void Training::call_on_weights(void (Engine::*method)(std::span<const Operand>)) {
  std::vector<Operand> weights = operands();
  call(weights, [&](std::span<const Operand> all) { (engine_.get()->*method)(all); });
}

StepPlan Training::plan() const {
  const Clock clock = engine_->clock();
  const int64_t step = clock.step + 1;
  StepPlan plan;
  plan.warm_up = step <= script_.warm_up;
  const bool starts_window = !plan.warm_up && clock.window_step == 0;
  plan.selects = starts_window && (clock.last_selection == 0 || step - clock.last_selection >= script_.select_interval);
  plan.ends_window = plan.warm_up || clock.window_step + 1 >= script_.settings.update_interval ||
                     (script_.settings.automatic && engine_->votes_to_end_window(script_.vote_share));
  plan.max_grad_norm = script_.max_grad_norm;
  return plan;
}

void Training::lend(Tensor& t, int64_t width) {
  const int64_t rows = matrix_of(t.sizes).rows;
  float* arrays[3];
  for (float*& array : arrays) {
    array = t.blocks.emplace_back(std::vector<float>(static_cast<size_t>(rows * width), NAN)).data();
  }
  t.width = width;
  engine_->parameter(t.index).lend({arrays[0], arrays[1], arrays[2], width});
}

// The rule of "adamw": whatever the schedule, the moments are those of AdamW on the same gradients.
void Training::expect_moments(Tensor& t, const Hyper& hyper, DType dtype, const std::vector<char>& gradient,
                              bool transposed) const {
  t.exp_avg.resize(static_cast<size_t>(t.count()));
  t.exp_avg_sq.resize(static_cast<size_t>(t.count()));
  const Fold fold = make_fold(hyper, t.maximize ? -1.0 : 1.0);
  const std::vector<int64_t> strides = transposed_strides(t.sizes);
  std::vector<int64_t> index(t.sizes.size());
  int64_t offset = 0;
  for (int64_t i = 0; i < t.count(); ++i) {
    const float g = with_dtype(dtype, [&]<DType D>() {
      using Bits = typename BitsOf<D>::type;
      return widen<D>(reinterpret_cast<const Bits*>(gradient.data())[transposed ? offset : i]);
    });
    fold_gradient(fold, g * fold.scale, t.exp_avg[static_cast<size_t>(i)], t.exp_avg_sq[static_cast<size_t>(i)]);
    for (size_t d = index.size(); d-- > 0;) {  // the next element, the last dimension fastest
      offset += strides[d];
      if (++index[d] < t.sizes[d]) break;
      offset -= strides[d] * std::exchange(index[d], 0);
    }
  }
}

void Training::step(const Event& event) {
  Random random(event.seed);
  Hyper hyper{.lr = random.one_of({1e-3, 1e-2, 1e-3, 0.0}),
              .beta1 = random.one_of({0.9, 0.9, 0.4}),
              .beta2 = random.one_of({0.999, 0.95}),
              .eps = 1e-8,
              .weight_decay = random.one_of({0.0, 0.1})};
  const StepPlan plan = this->plan();
  std::vector<std::vector<char>> gradients(kParameters);
  for (size_t i = 0; i < kParameters; ++i) {
    Tensor& t = tensors_[i];
    if (event.dtypes[i] < 0) continue;
    const DType dtype = static_cast<DType>(event.dtypes[i]);
    gradients[i].resize(static_cast<size_t>(t.count() * item_size(dtype)));
    fill(random, dtype, gradients[i], t.gradient_scale, static_cast<int>(random.between(2, 30)));
    if (random.chance(5)) store_rounded(dtype, gradients[i].data(), random.between(0, t.count() - 1), NAN);
    if (knows_moments()) expect_moments(t, hyper, dtype, gradients[i], event.transposed);
    if (t.index < 0) {
      t.index = add(t);
      if (!t.split) lend(t, t.columns());
    }
    if (random.chance(10) && t.topk_ratio > 0 && t.topk_ratio < 1) t.topk_ratio = random.one_of({0.05, 0.1, 0.2});
    if (!t.split || plan.warm_up || !(plan.selects || t.width < 0)) continue;
    const int64_t width = selected_count(t.topk_ratio, t.columns());
    if (t.width != width) lend(t, width);
  }
  std::vector<Operand> all = operands();
  size_t next = 0;
  for (size_t i = 0; i < kParameters; ++i) {
    if (tensors_[i].index < 0) continue;
    Operand& o = all[next++];
    o.hyper = hyper;
    if (event.dtypes[i] < 0) continue;
    const std::vector<int64_t> strides =
        event.transposed ? transposed_strides(tensors_[i].sizes) : std::vector<int64_t>();
    o.gradient = engine_->view(tensors_[i].index, gradients[i].data(), static_cast<DType>(event.dtypes[i]), strides);
  }
  if (variant_.stages) stage(all, plan, random);
  const FlushDenormals mode(variant_.flushes_denormals);
  call(all, [&](std::span<const Operand> operands) {
    engine_->commit(operands, plan);
    if (!event.hashed || !script_.hashes_steps) return;
    digests_.push_back(__builtin_bit_cast(uint64_t, engine_->report().gradient_norm));
    digests_.push_back(exported_digest());
  });
  for (Tensor& t : tensors_) t.suspect = false;
}

// What backward does in hook mode, with gradients that come back and go again now and then.
void Training::stage(std::vector<Operand>& operands, const StepPlan& plan, Random random) {
  const bool measures = plan.max_grad_norm > 0 || script_.settings.automatic;
  const bool publishes = engine_->clock().publish_at == engine_->clock().step + 1 && !plan.selects && !plan.warm_up;
  for (Operand& o : operands) {
    Parameter& p = *o.parameter;
    if (!o.gradient || !p.split() || random.chance(20)) continue;
    const auto index = std::find_if(tensors_.begin(), tensors_.end(), [&](const Tensor& t) {
                         return t.index >= 0 && &engine_->parameter(t.index) == &p;
                       })->index;
    std::vector<Operand> one{o};
    do {
      call(one, [&](std::span<const Operand> operand) { engine_->stage(operand[0], plan, measures); });
      one = {o};
      if (!random.chance(20)) break;
      std::vector<char> back(static_cast<size_t>(p.shape().count() * item_size(o.gradient.dtype())));
      const int64_t sizes[] = {p.shape().rows, p.shape().columns};
      one[0].gradient = TensorView(back.data(), o.gradient.dtype(), sizes, {});
      call(one, [&](std::span<const Operand> operand) { engine_->unstage(index, operand[0].gradient.at(0)); });
      CHECK_EQ(digest_of(TensorView(back.data(), o.gradient.dtype(), sizes, {})), digest_of(o.gradient));
      one = {o};
    } while (true);
    o.gradient = TensorView();
    o.staged = true;
    if (!publishes || random.chance(30)) continue;
    one = {o};
    call(one, [&](std::span<const Operand> operand) {
      engine_->publish_early(operand[0]);
      engine_->join_publications();
    });
  }
}

Training::Exported Training::export_state(const Tensor& t) {
  const Parameter& p = engine_->parameter(t.index);
  const size_t count = static_cast<size_t>(t.count()), columns = static_cast<size_t>(t.columns());
  Exported e;
  for (auto* array : {&e.exp_avg, &e.exp_avg_sq, &e.master}) array->resize(count);
  for (auto* array : {&e.last_written, &e.pending_output})
    array->resize(count * static_cast<size_t>(item_size(t.dtype)));
  if (script_.settings.mean) e.window_sum.resize(count), e.column_steps.resize(columns);
  e.selected = std::make_unique<bool[]>(columns);
  engine_->export_state(t.index, e.view());
  e.selected_count = std::count(e.selected.get(), e.selected.get() + columns, true);
  e.clock = {p.steps(), p.has_selection(), p.in_flight(), p.window(), engine_->vote(t.index)};
  return e;
}

Training::Exported Training::export_alone(const Tensor& t) {
  Exported state;
  std::vector<Operand> none;
  call(none, [&](auto) { state = export_state(t); });
  return state;
}

int64_t Training::add(const Tensor& t) {
  return engine_->add(t.sizes, t.dtype, t.split, nullptr, device_of(static_cast<size_t>(&t - tensors_.data())));
}

void Training::import(Tensor& t, const Exported& state, bool in_flight) {
  t.index = add(t);
  t.suspect = true;
  ImportedClock clock = state.clock;
  clock.in_flight = in_flight;
  if (clock.has_selection || !t.split) lend(t, state.selected_count);
  std::vector<Operand> none;
  call(none, [&](auto) { engine_->import_state(t.index, state.view(), clock); });
}

// Saves everything and goes on in a new engine, with the other host buffer.
void Training::restart() {
  std::vector<Exported> states(kParameters);
  for (size_t i = 0; i < kParameters; ++i) {
    if (tensors_[i].index >= 0) states[i] = export_alone(tensors_[i]);
  }
  const Clock clock = engine_->clock();
  variant_.stream = !variant_.stream;
  engine_ = make_engine();
  for (size_t i = 0; i < kParameters; ++i) {
    Tensor& t = tensors_[i];
    if (t.index < 0) continue;
    t.blocks.clear();
    t.width = -1;
    import(t, states[i], clock.publish_at > 0);
  }
  engine_->set_clock(clock);
}

// Gives one parameter another place in the same engine, while others may be in flight.
void Training::move(Tensor& t) {
  if (t.index < 0) return;
  const int64_t before = t.index;
  const Exported state = export_alone(t);
  import(t, state, state.clock.in_flight);
  engine_->discard(before);
}

uint64_t Training::weights_digest() const {
  Digest digest;
  for (const Tensor& t : tensors_) digest.add_array(t.dtype, t.weights.data(), t.count());
  return digest.value();
}

uint64_t Training::state_digest() {
  uint64_t digest = 0;
  std::vector<Operand> weights = operands();
  call(weights, [&](std::span<const Operand> all) {
    engine_->adopt_edits(all);
    digest = exported_digest();
  });
  return digest;
}

uint64_t Training::exported_digest() {
  Digest digest;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& t = tensors_[(i + digests_.size()) % tensors_.size()];  // each comes first now and then
    if (t.index < 0) continue;
    const Exported e = export_state(t);
    for (const auto* array : {&e.exp_avg, &e.exp_avg_sq, &e.master, &e.window_sum}) {
      digest.add_array(DType::kFloat32, array->data(), static_cast<int64_t>(array->size()));
    }
    for (const auto* array : {&e.last_written, &e.pending_output}) digest.add_array(t.dtype, array->data(), t.count());
    for (int64_t c = 0; c < t.columns(); ++c) digest.add(e.selected[static_cast<size_t>(c)]);
    for (int32_t steps : e.column_steps) digest.add(static_cast<uint64_t>(steps));
    for (int64_t n : {e.clock.steps, e.clock.window.count}) digest.add(static_cast<uint64_t>(n));
    const Vote& vote = e.clock.vote;
    digest.add(static_cast<uint64_t>(vote.count));
    for (double d : {e.clock.window.lr_sum, e.clock.window.keep, vote.selected, vote.deferred}) {
      digest.add(std::isnan(d) ? 0 : __builtin_bit_cast(uint64_t, d));
    }
  }
  return digest.value();
}

}  // namespace zenflow_test
