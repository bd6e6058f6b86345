// SPDX-License-Identifier: Apache-2.0
//
// FunctionRef<R(Args...)>: a borrowed callable, two pointers wide. It never allocates and never
// copies the callable, so it suits parameters that are called before the function returns; the
// callable must outlive it. Takes callable objects and lambdas (for a plain function pass a lambda).
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace zenflow {

template <typename Signature>
class FunctionRef;

template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  template <typename F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef> && std::is_object_v<std::remove_reference_t<F>> &&
             std::is_invocable_r_v<R, F&, Args...>)
  FunctionRef(F&& callable) noexcept
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(std::forward<Args>(args)...);
        }) {}

  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

}  // namespace zenflow
