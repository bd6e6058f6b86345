// SPDX-License-Identifier: Apache-2.0
// The selective pass: deferred columns packed, selected ones updated or kept.
#include "adam_by_definition.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

void check_selective(Random& random, const Shape& shape, DType dtype, DType weight_dtype, DType packed_dtype) {
  const bool wild = random.chance(20);
  const Places places = random_places(random, shape.columns);
  const Elements gradient = random_elements(random, dtype, shape.count(), wild);
  State state = random_state(random, weight_dtype, shape, places.device_columns, wild);
  const Settings settings = random_settings(random, places.width());

  const DeviceElements gradient_memory(gradient, random.between(0, 3));
  const DeviceElements packed(nothing(packed_dtype, shape.rows * places.slots()), random.between(0, 3));
  const DeviceArray<int32_t> place(places.place);
  const DeviceState memory(state, random.between(0, 3));
  const DeviceSettings values(settings);
  SelectivePass pass{gradient_memory.data(),
                     dtype,
                     shape.rows,
                     shape.columns,
                     place.data(),
                     places.slots() > 0 ? packed.data() : nullptr,
                     packed_dtype,
                     places.slots(),
                     memory.weight.data(),
                     weight_dtype,
                     memory.master.floats(),
                     memory.exp_avg.floats(),
                     memory.exp_avg_sq.floats(),
                     places.width(),
                     settings.fold,
                     settings.move,
                     values.scale(),
                     values.steps(),
                     values.roots(),
                     nullptr};
  selective_adam(pass, test_stream());

  for (int64_t i = 0; i < shape.rows * places.width(); ++i) {
    const int64_t p = i % places.width();
    const int64_t at = i / places.width() * shape.columns + places.device_columns[static_cast<size_t>(p)];
    step_by_definition(settings, gradient.at(at), i, p, at, state);
  }
  memory.check(state);
  CHECK_EQ(first_difference(packed.read(), packed_by_definition(gradient, shape, places.slot_columns, packed_dtype)),
           -1);
  CHECK_EQ(first_difference(gradient_memory.read(), gradient), -1);
}

}  // namespace

TEST(selective_pass_in_all_dtypes) {
  Random random(11);
  for (const DType gradient : kDTypes) {
    for (const DType weight : kDTypes) {
      for (const DType packed : {gradient, DType::kFloat32}) {
        for (int round = 0; round < 3; ++round) check_selective(random, random_shape(random), gradient, weight, packed);
      }
    }
  }
}

TEST(selective_pass_of_odd_shapes) {
  Random random(12);
  for (const Shape& shape :
       {Shape{0, 4}, Shape{4, 0}, Shape{1, 1}, Shape{1, 70000}, Shape{700, 3}, Shape{513, 32}, Shape{130, 300}}) {
    check_selective(random, shape, DType::kBFloat16, DType::kBFloat16, DType::kBFloat16);
    check_selective(random, shape, DType::kFloat16, DType::kFloat32, DType::kFloat32);
  }
}

TEST(selective_pass_refuses_to_pack_in_another_dtype) {
  Random random(13);
  CHECK_THROWS(std::invalid_argument,
               check_selective(random, {4, 4}, DType::kFloat32, DType::kFloat32, DType::kBFloat16));
}

TEST(kept_columns_and_their_return) {
  Random random(14);
  for (int round = 0; round < 30; ++round) {
    const DType dtype = random_dtype(random), packed_dtype = random.chance(70) ? dtype : DType::kFloat32;
    const Shape shape = random.chance(10) ? Shape{0, 5} : random_shape(random);
    const Places places = random_places(random, shape.columns);
    const Elements gradient = random_elements(random, dtype, shape.count(), true);
    const DeviceElements gradient_memory(gradient), back(nothing(dtype, shape.count()), 1);
    const DeviceElements packed(nothing(packed_dtype, shape.rows * places.slots()), 1);
    const DeviceElements kept(nothing(dtype, shape.rows * places.width()), 1);
    const DeviceArray<int32_t> place(places.place);
    SelectivePass pass{};
    pass.gradient = gradient_memory.data(), pass.gradient_dtype = dtype;
    pass.rows = shape.rows, pass.columns = shape.columns, pass.place = place.data();
    pass.packed = packed.data(), pass.packed_dtype = packed_dtype, pass.slots = places.slots();
    pass.width = places.width(), pass.kept = kept.data();
    selective_adam(pass, test_stream());
    CHECK_EQ(first_difference(packed.read(), packed_by_definition(gradient, shape, places.slot_columns, packed_dtype)),
             -1);
    CHECK_EQ(first_difference(kept.read(), packed_by_definition(gradient, shape, places.device_columns, dtype)), -1);
    pass.gradient = nullptr;
    unpack(pass, back.data(), test_stream());
    CHECK_EQ(first_difference(back.read(), gradient), -1);
  }
}
