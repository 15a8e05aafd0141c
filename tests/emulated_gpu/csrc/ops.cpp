// torch's operators on tensors of the emulated device: the CPU's kernels on the same memory.
//
// One boxed function replaces every CUDA kernel in the dispatcher. It adds the work to the current
// stream, so a capture records the addresses and host numbers of that moment, and a replay computes
// with the contents of that memory at the replay.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <cstring>
#include <deque>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "runtime.h"

namespace py = pybind11;
using c10::IValue;
using torch::jit::Stack;

namespace {

thread_local bool written_now = false;  // results are being written: do not poison them
std::deque<c10::RegistrationHandleRAII> registrations;

// These refuse a 0-dim host tensor, which most operators take as a number.
const std::unordered_set<std::string> NO_HOST_NUMBERS = {
    "aten::gather", "aten::scatter", "aten::scatter_", "aten::scatter_add_", "aten::index_select",
    "aten::index_add_", "aten::index_copy_", "aten::mm", "aten::bmm", "aten::addmm", "aten::cat",
    "aten::embedding", "aten::take", "aten::index_fill_"};
// These copy indices from the host, and so wait.
const std::unordered_set<std::string> TAKES_HOST_INDICES = {"aten::index", "aten::_index_put_impl_",
                                                            "aten::_unsafe_index"};
// These wait, since the size of their result depends on the contents of tensors.
const std::unordered_set<std::string> WAITS = {
    "aten::nonzero",  "aten::masked_select",     "aten::_unique2",          "aten::unique_dim",
    "aten::bincount", "aten::unique_consecutive", "aten::equal", "aten::_unique"};

void check(int error, const std::string& what) {
  if (!error) return;
  c10::cuda::c10_cuda_check_implementation(static_cast<int32_t>(error), __FILE__, what.c_str(),
                                           __LINE__, false);
}

at::Tensor host_view(const at::Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options);
}
at::Tensor meta(const at::Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kMeta);
  return at::empty_strided(t.sizes(), t.strides(), options);
}

template <typename F>
IValue map_tensors(const IValue& value, F f) {
  if (value.isTensor()) {
    const auto& t = value.toTensor();
    return t.defined() ? IValue(f(t)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (value.isList() && value.toListRef().size()) {
    bool any = false;
    for (const auto& item : value.toListRef()) any |= item.isTensor();
    if (any) {
      c10::List<std::optional<at::Tensor>> out;
      for (const auto& item : value.toListRef())
        out.push_back(item.isTensor() && item.toTensor().defined()
                          ? std::optional<at::Tensor>(f(item.toTensor()))
                          : std::nullopt);
      return out;
    }
  }
  return value;
}

// Arguments for a CPU or a meta kernel.
Stack moved(const c10::FunctionSchema& schema, const Stack& args, c10::Device to) {
  Stack out;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto& value = args[i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      out.emplace_back(to);
    } else if (value.isGenerator()) {
      out.emplace_back();
    } else if (schema.arguments()[i].name() == "pin_memory" && value.isBool()) {
      out.emplace_back(false);
    } else {
      out.push_back(map_tensors(value, [&](const at::Tensor& t) {
        return !t.is_cuda() ? t : to.is_cpu() ? host_view(t) : meta(t);
      }));
    }
  }
  return out;
}

at::Tensor room_for(const at::Tensor& like) {
  auto options = at::TensorOptions().dtype(like.dtype()).device(at::kCUDA);
  if (!like.is_non_overlapping_and_dense()) return at::empty(like.sizes(), options);
  return at::empty_strided(like.sizes(), like.strides(), options);
}
void put(const at::Tensor& to, const at::Tensor& from) {
  if (!from.numel()) return;
  if (to.strides() == from.strides() && from.is_non_overlapping_and_dense())
    memcpy(to.data_ptr(), from.data_ptr(), from.numel() * from.itemsize());
  else
    to.copy_(from);
}

struct Work {
  c10::OperatorHandle op;
  Stack args;                     // host views
  std::vector<at::Tensor> fresh;  // host views of the results; undefined: not wanted
  std::vector<int> owners;        // per return: the argument that it aliases, or -1
};

// All results that are new tensors.
std::vector<at::Tensor> fresh_of(const Stack& returns, const std::vector<int>& owners) {
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < returns.size(); ++i) {
    if (owners[i] >= 0) continue;
    if (returns[i].isTensor())
      out.push_back(returns[i].toTensor());
    else if (returns[i].isTensorList())
      for (const auto& t : returns[i].toTensorVector()) out.push_back(t);
  }
  return out;
}

Stack compute(const c10::OperatorHandle& op, Stack args) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &args);
  return args;
}

void run_work(void* data) {
  auto& work = *static_cast<Work*>(data);
  try {
    auto found = fresh_of(compute(work.op, work.args), work.owners);
    for (size_t i = 0; i < found.size(); ++i)
      if (work.fresh[i].defined() && found[i].defined()) {
        TORCH_CHECK(found[i].sizes() == work.fresh[i].sizes(), "shape differs from the meta kernel's");
        put(work.fresh[i], found[i]);
      }
  } catch (const std::exception& error) {
    emu_fault((work.op.schema().name() + ": " + error.what()).c_str());
  }
}
void drop_work(void* data) { delete static_cast<Work*>(data); }

// The returns of a meta kernel. Those in Python take longer than most of the kernels, so they are
// kept by all that they may depend on; tensors without memory hold shapes only.
const Stack& shapes_of(const c10::OperatorHandle& op, const Stack& args) {
  static std::unordered_map<std::string, Stack> known;
  Stack given = moved(op.schema(), args, at::kMeta);
  std::ostringstream key;
  key << op.operator_name();
  for (const auto& value : given) {
    bool tensors = false;
    map_tensors(value, [&](const at::Tensor& t) {
      key << '|' << t.device() << t.dtype() << t.sizes() << t.strides();
      return tensors = true, t;
    });
    if (value.isList() && tensors)
      for (const auto& item : value.toListRef()) key << (item.isTensor() ? 't' : '-');
    else if (!tensors)
      key << '|' << value.tagKind() << value;
  }
  auto found = known.find(key.str());
  if (found != known.end()) return found->second;
  op.callBoxed(&given);
  return known.emplace(key.str(), std::move(given)).first->second;
}

// Resize `out=` arguments as the kernel did; copy what a CPU kernel wrote into resized ones.
void fit(const c10::FunctionSchema& schema, const Stack& args, const Stack& like) {
  for (size_t i = 0; i < args.size(); ++i) {
    const auto* info = schema.arguments()[i].alias_info();
    if (!info || !info->isWrite() || !args[i].isTensor() || !args[i].toTensor().is_cuda()) continue;
    auto to = args[i].toTensor();
    const auto& from = like[i].toTensor();
    if (to.sizes() == from.sizes()) continue;
    to.resize_(from.sizes());
    if (from.is_cpu()) put(host_view(to), from);
  }
}

bool is_mask(const IValue& indices) {
  if (!indices.isList()) return false;
  for (const auto& item : indices.toListRef())
    if (item.isTensor() && item.toTensor().defined() &&
        (item.toTensor().scalar_type() == at::kBool || item.toTensor().scalar_type() == at::kByte))
      return true;
  return false;
}

void check_devices(const c10::FunctionSchema& schema, const Stack& args, bool& copies_indices) {
  const auto& name = schema.name();
  bool cuda = false;
  for (const auto& value : args)
    map_tensors(value, [&](const at::Tensor& t) { return cuda |= t.is_cuda(), t; });
  if (!cuda) return;
  for (size_t i = 0; i < args.size(); ++i)
    map_tensors(args[i], [&](const at::Tensor& t) {
      if (t.is_cuda() || t.is_meta()) return t;
      if (TAKES_HOST_INDICES.count(name)) {
        if (i == 1 && args[0].toTensor().is_cuda()) {
          copies_indices = true;
          return t;
        }
        if (i == 2 && t.dim() == 0) return t;
      } else if (t.dim() == 0 && !NO_HOST_NUMBERS.count(name)) {
        return t;
      }
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two "
                  "devices, cuda:0 and cpu! (when checking argument ", schema.arguments()[i].name(),
                  " of ", name, ")");
    });
}

void emulate(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  Stack args(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  auto stream = c10::cuda::getCurrentCUDAStream().stream();

  bool copies_indices = false;
  check_devices(schema, args, copies_indices);
  const bool mask = TAKES_HOST_INDICES.count(schema.name()) && is_mask(args[1]);
  const bool repeats = schema.name() == "aten::repeat_interleave" && args.back().isNone();
  const bool waits = copies_indices || mask || repeats || WAITS.count(schema.name());
  if (waits) {
    if (c10::cuda::warning_state().get_sync_debug_mode() != c10::cuda::SyncDebugMode::L_DISABLED)
      c10::cuda::warn_or_error_on_sync();
    check(emu_wait(stream, schema.name().c_str()), schema.name());
  }
  const bool later = !waits && (emu_capturing(stream) || emu_lazy());

  std::vector<int> owners;
  bool makes_new = false;
  for (const auto& result : schema.returns()) {
    int owner = -1;
    if (const auto* info = result.alias_info(); info && info->isWrite())
      for (size_t i = 0; i < count; ++i)
        if (const auto* other = schema.arguments()[i].alias_info();
            other && other->isWrite() && other->beforeSets() == info->beforeSets())
          owner = static_cast<int>(i);
    owners.push_back(owner);
    makes_new |= owner < 0;
  }

  const bool out = schema.overload_name().find("out") != std::string::npos;
  if (out && later) {
    Stack shapes = moved(schema, args, at::kMeta), given = shapes;
    op.callBoxed(&shapes);
    fit(schema, args, given);
  }
  Stack host = moved(schema, args, at::kCPU), returns;
  std::vector<at::Tensor> fresh;
  if (!later) {
    struct Now {
      Now() { written_now = true; }
      ~Now() { written_now = false; }
    } now;
    returns = compute(op, host);
    if (out) fit(schema, args, host);
    for (const auto& t : fresh_of(returns, owners)) {
      if (!t.defined()) {
        fresh.push_back(t);
        continue;
      }
      at::Tensor out;
      // A view of an argument stays a view.
      for (size_t i = 0; i < count && !out.defined(); ++i)
        if (args[i].isTensor() && args[i].toTensor().defined() && args[i].toTensor().is_cuda() &&
            host[i].toTensor().storage().data() && t.numel() &&
            t.storage().data() == host[i].toTensor().storage().data())
          out = args[i].toTensor().as_strided(
              t.sizes(), t.strides(), args[i].toTensor().storage_offset() + t.storage_offset());
      if (!out.defined()) {
        out = room_for(t);
        put(host_view(out), t);
      }
      fresh.push_back(out);
    }
  } else {
    auto work = std::make_unique<Work>(Work{op, host, {}, owners});
    if (makes_new) {
      // The results' shapes. An operator without a meta kernel raises here.
      returns = shapes_of(op, args);
      for (const auto& t : fresh_of(returns, owners)) {
        fresh.push_back(t.defined() ? room_for(t) : t);
        work->fresh.push_back(t.defined() ? host_view(fresh.back()) : t);
      }
    } else {
      for (size_t i = 0; i < schema.returns().size(); ++i) returns.emplace_back(args[owners[i]]);
    }
    check(emu_enqueue(stream, run_work, drop_work, work.release(), schema.name().c_str()),
          schema.name());
  }
  size_t next = 0;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (owners[i] >= 0) {
      stack->push_back(args[owners[i]]);
    } else if (returns[i].isTensor()) {
      stack->emplace_back(fresh[next++]);
    } else if (returns[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (size_t j = 0; j < returns[i].toTensorVector().size(); ++j) list.push_back(fresh[next++]);
      stack->emplace_back(list);
    } else {
      stack->push_back(returns[i]);
    }
  }
}

// Copies between devices are torch's own, which calls the runtime.
void emulate_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  auto& to = (*stack)[stack->size() - 3].toTensor();
  auto& from = (*stack)[stack->size() - 2].toTensor();
  if (to.is_cuda() && from.is_cuda()) return emulate(op, keys, stack);
  at::Tensor self = to, src = from;
  const bool non_blocking = stack->back().toBool();
  stack->erase(stack->end() - 3, stack->end());
  at::AutoDispatchBelowADInplaceOrView below;
  at::native::copy_(self, src, non_blocking);
  stack->emplace_back(self);
}

// Lists may mix devices: their pairs are copied one by one.
void emulate_foreach_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  auto tos = (*stack)[stack->size() - 3].toTensorVector();
  auto froms = (*stack)[stack->size() - 2].toTensorVector();
  bool host = false;
  for (auto* list : {&tos, &froms})
    for (auto& t : *list) host |= !t.is_cuda();
  if (!host) return emulate(op, keys, stack);
  const bool non_blocking = stack->back().toBool();
  stack->erase(stack->end() - 3, stack->end());
  for (size_t i = 0; i < tos.size(); ++i) tos[i].copy_(froms[i], non_blocking);
}

void install(const std::vector<std::pair<std::string, std::string>>& names) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& [name, overload] : names) {
    auto kernel = name == "aten::copy_" ? c10::KernelFunction::makeFromBoxedFunction<&emulate_copy>()
                  : name == "aten::_foreach_copy_"
                      ? c10::KernelFunction::makeFromBoxedFunction<&emulate_foreach_copy>()
                      : c10::KernelFunction::makeFromBoxedFunction<&emulate>();
    registrations.push_back(dispatcher.registerImpl({name, overload}, c10::DispatchKey::CUDA,
                                                    std::move(kernel), std::nullopt, nullptr,
                                                    "emulated device"));
  }
}

// ---- EMU_POISON: unwritten memory reads as NaN or -1, at each replay as well ----

at::Tensor poisoned(at::Tensor t) {
  if (!t.numel() || written_now) return t;
  // The whole storage, since strides may leave gaps.
  char* begin = static_cast<char*>(t.storage().mutable_data());
  size_t bytes = t.storage().nbytes();
  auto current = c10::cuda::getCurrentCUDAStream().stream();
  if (emu_lazy() && !emu_capturing(current)) {
    // A device would write nothing. Queued, this could overwrite another stream's results; at once,
    // memory that queued work still reads.
    if (emu_idle(current)) memset(begin, 0xFF, bytes);
    return t;
  }
  struct Memory {
    char* begin;
    size_t bytes;
  };
  emu_enqueue(
      c10::cuda::getCurrentCUDAStream().stream(),
      [](void* data) {
        auto* m = static_cast<Memory*>(data);
        memset(m->begin, 0xFF, m->bytes);
      },
      [](void* data) { delete static_cast<Memory*>(data); }, new Memory{begin, bytes}, "poison");
  return t;
}
at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  return poisoned(at::detail::empty_cuda(C10_AS_INTARRAYREF_SLOW(size), dtype, layout, device, pin, format));
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> pin) {
  return poisoned(at::detail::empty_strided_cuda(C10_AS_INTARRAYREF_SLOW(size),
                                                 C10_AS_INTARRAYREF_SLOW(stride), dtype, layout,
                                                 device, pin));
}
void install_poison() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
}

// ---- Python's own work: Triton kernels ----

struct PyWork {
  py::object call;
  std::string name;
};
void run_python(void* data) {
  py::gil_scoped_acquire locked;
  auto& work = *static_cast<PyWork*>(data);
  try {
    work.call();
  } catch (py::error_already_set& error) {
    emu_fault((work.name + ": " + error.what()).c_str());
  }
}
void drop_python(void* data) {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire locked;
  delete static_cast<PyWork*>(data);
}

}  // namespace

PYBIND11_MODULE(_emulated_gpu, m) {
  m.def("install", &install);
  m.def("install_poison", &install_poison);
  m.def("alias", [](const at::Tensor& t) { return host_view(t); });
  m.def("holds", [](uintptr_t address) { return bool(emu_holds(reinterpret_cast<void*>(address))); });
  m.def("lazy", [] { return bool(emu_lazy()); });
  m.def("capturing", [] { return bool(emu_capturing(c10::cuda::getCurrentCUDAStream().stream())); });
  m.def("note", [](bool on) { emu_note(on); });
  m.def("noted", [] {
    std::vector<std::string> names;
    for (size_t i = 0; emu_noted(i); ++i) names.emplace_back(emu_noted(i));
    return names;
  });
  m.def("enqueue", [](py::object call, const std::string& name) {
    auto stream = c10::cuda::getCurrentCUDAStream().stream();
    check(emu_enqueue(stream, run_python, drop_python, new PyWork{call, name}, name.c_str()), name);
  });
}
