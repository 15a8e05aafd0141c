// The CUDA runtime without a device: its memory is host memory, and a stream is a list of closures.
// It is preloaded, and so replaces the libcudart.so that torch loads.
//
// Environment (`run.py` sets it):
//   EMU_LAZY=1            a stream runs its work only when the host waits for it
//   EMU_SKIP_KERNELS=1    launching a compiled kernel does nothing, instead of being an error
//   EMU_POISON=1          fresh device and pinned memory reads as 0xFF (NaN, -1)
//   EMU_TRACE=1           print refused calls
//   EMU_TRACE_ALL=1       print each call that waits and each operation, too
//   EMU_MEMORY_GB=80      size of the device

#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime.h"

// ---- settings ----

namespace {

int env_int(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}
const int TRACE = env_int("EMU_TRACE_ALL", 0) ? 2 : env_int("EMU_TRACE", 0);
const bool LAZY = env_int("EMU_LAZY", 0);
const bool POISON = env_int("EMU_POISON", 0);
const bool SKIP_KERNELS = env_int("EMU_SKIP_KERNELS", 0);
const size_t GIB = size_t(1) << 30;
const size_t TOTAL = GIB * env_int("EMU_MEMORY_GB", 80);
const size_t CONTEXT = size_t(500) << 20;  // memory of a real device's context

void trace(int level, const char* format, const char* a = "", const char* b = "") {
  if (TRACE >= level) {
    fprintf(stderr, "[emu] ");
    fprintf(stderr, format, a, b);
    fputc('\n', stderr);
  }
}

// ---- memory ----

struct Arena {
  char* base = nullptr;
  size_t size;
  std::map<size_t, size_t> free_ranges;        // offset -> length
  std::unordered_map<size_t, size_t> taken;    // offset -> length
  size_t in_use = 0;
  std::mutex mutex;

  explicit Arena(size_t bytes) : size(bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
      perror("[emu] mmap of the device's memory");
      abort();
    }
    base = static_cast<char*>(at);
    free_ranges[0] = bytes;
  }
  bool holds(const void* p) const { return p >= base && p < base + size; }
  void* take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    bytes = (std::max<size_t>(bytes, 1) + 511) / 512 * 512;
    for (auto it = free_ranges.begin(); it != free_ranges.end(); ++it) {
      if (it->second < bytes) continue;
      size_t offset = it->first, left = it->second - bytes;
      free_ranges.erase(it);
      if (left) free_ranges[offset + bytes] = left;
      taken[offset] = bytes;
      in_use += bytes;
      if (POISON && bytes <= (size_t(256) << 20)) memset(base + offset, 0xFF, bytes);
      return base + offset;
    }
    return nullptr;
  }
  bool give(void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    size_t offset = static_cast<char*>(p) - base;
    auto found = taken.find(offset);
    if (found == taken.end()) return false;
    size_t bytes = found->second;
    taken.erase(found);
    in_use -= bytes;
    size_t page = 4096, from = (offset + page - 1) / page * page,
           to = (offset + bytes) / page * page;
    if (to > from) madvise(base + from, to - from, MADV_DONTNEED);
    auto next = free_ranges.lower_bound(offset);
    if (next != free_ranges.end() && offset + bytes == next->first) {
      bytes += next->second;
      next = free_ranges.erase(next);
    }
    if (next != free_ranges.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return true;
      }
    }
    free_ranges[offset] = bytes;
    return true;
  }
};

Arena& device() {
  static Arena* arena = new Arena(TOTAL);
  return *arena;
}
Arena& pinned() {
  static Arena* arena = new Arena(16 * GIB);
  return *arena;
}
std::mutex registered_mutex;
std::map<char*, size_t> registered;  // cudaHostRegister

bool is_pinned(const void* p) {
  if (pinned().holds(p)) return true;
  std::lock_guard<std::mutex> lock(registered_mutex);
  auto it = registered.upper_bound((char*)p);
  if (it == registered.begin()) return false;
  --it;
  return (char*)p < it->first + it->second;
}

// ---- streams, events, graphs ----

using Clock = std::chrono::steady_clock;

struct Stream;
struct Record {  // one cudaEventRecord
  std::atomic<bool> done{false};
  std::atomic<int> asked{0};
  Clock::time_point when;
  Stream* stream = nullptr;
};
struct Node {
  void (*run)(void*) = nullptr;
  void (*drop)(void*) = nullptr;
  void* data = nullptr;
  std::string name;
  std::shared_ptr<Record> record, wait;
  Node() = default;
  Node(const Node&) = delete;
  ~Node() {
    if (drop) drop(data);
  }
};
using Nodes = std::vector<std::shared_ptr<Node>>;
struct Graph {
  std::shared_ptr<Nodes> nodes = std::make_shared<Nodes>();
};
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  Stream* origin;
  std::shared_ptr<Nodes> nodes = std::make_shared<Nodes>();
  Graph* graph = nullptr;
  bool broken = false;
  pthread_t thread;
  std::map<Stream*, size_t> last;  // the last node of each of its streams
  std::set<Stream*> streams;
};
using Known = std::map<Stream*, size_t>;
struct Stream {
  bool blocking = false;
  int priority = 0;
  std::deque<std::shared_ptr<Node>> queue;
  bool running = false;
  std::shared_ptr<Capture> capture;
  Known known;  // in a capture: the nodes that come before
  size_t serial = 0;
};
struct Event {
  std::shared_ptr<Record> record;
  std::shared_ptr<Capture> capture;
  Known known;
  bool timing = true;
};

std::recursive_mutex state;
std::condition_variable_any changed;
std::set<Stream*> streams;
std::set<std::shared_ptr<Capture>> captures;
unsigned long long next_capture = 1;
size_t node_serial = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
Stream default_stream;
std::atomic<bool> faulty{false};

Stream* at(cudaStream_t s) {
  auto n = reinterpret_cast<uintptr_t>(s);
  if (n <= 2) {
    default_stream.blocking = true;
    return &default_stream;
  }
  return reinterpret_cast<Stream*>(s);
}

cudaError_t fail(cudaError_t error, const char* call) {
  last_error = error;
  if (error != cudaErrorNotReady) trace(1, "%s: %s", call, cudaGetErrorName(error));
  return error;
}

// Refuse a call that may wait for the device while a capture is active: in mode Global for threads
// that have not relaxed theirs, in ThreadLocal for the capturing thread.
cudaError_t unsafe(const char* call) {
  std::lock_guard<std::recursive_mutex> lock(state);
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto& capture : captures) {
    bool mine = pthread_equal(capture->thread, pthread_self());
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    if (capture->mode == cudaStreamCaptureModeGlobal
            ? (mine || thread_mode == cudaStreamCaptureModeGlobal)
            : mine) {
      capture->broken = true;
      return fail(cudaErrorStreamCaptureUnsupported, call);
    }
  }
  return cudaSuccess;
}

// Release Python's lock while waiting for another thread's closures, which may be Python's.
struct WithoutPython {
  using Check = int (*)();
  using Save = void* (*)();
  using Restore = void (*)(void*);
  void* saved = nullptr;
  WithoutPython() {
    static auto check = (Check)dlsym(RTLD_DEFAULT, "PyGILState_Check");
    static auto save = (Save)dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    if (check && save && check()) saved = save();
  }
  ~WithoutPython() {
    static auto restore = (Restore)dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    if (saved) restore(saved);
  }
};

void run_node(Node& node, Stream* stream);

// Run the queue of `stream`, up to `until` (null: all of it).
void flush(Stream* stream, const Record* until = nullptr) {
  for (;;) {
    std::shared_ptr<Node> node;
    {
      std::unique_lock<std::recursive_mutex> lock(state);
      if (until && until->done) return;
      if (stream->running) {
        lock.unlock();
        WithoutPython released;
        std::unique_lock<std::recursive_mutex> again(state);
        changed.wait_for(again, std::chrono::milliseconds(50));
        continue;
      }
      if (stream->queue.empty()) return;
      node = stream->queue.front();
      stream->queue.pop_front();
      stream->running = true;
    }
    run_node(*node, stream);
    {
      std::lock_guard<std::recursive_mutex> lock(state);
      stream->running = false;
      changed.notify_all();
    }
  }
}

void run_node(Node& node, Stream* stream) {
  if (node.wait && !node.wait->done) flush(node.wait->stream, node.wait.get());
  trace(2, "run %s", node.name.c_str());
  if (node.run) node.run(node.data);
  if (node.record) {
    node.record->when = Clock::now();
    node.record->done = true;
  }
}

// What streams are given while `noting`: the names of operations, and of a graph's nodes behind "graph".
bool noting = false;
std::vector<std::string> noted;

cudaError_t add(Stream* stream, std::shared_ptr<Node> node) {
  {
    std::lock_guard<std::recursive_mutex> lock(state);
    if (noting && !stream->capture) noted.push_back(node->name);
    if (stream->capture) {
      auto& capture = *stream->capture;
      if (capture.broken) return fail(cudaErrorStreamCaptureInvalidated, node->name.c_str());
      capture.nodes->push_back(node);
      capture.last[stream] = stream->known[stream] = ++node_serial;
      return cudaSuccess;
    }
    if (LAZY) {
      stream->queue.push_back(node);
      return cudaSuccess;
    }
  }
  run_node(*node, stream);
  return cudaSuccess;
}

template <typename F>
cudaError_t add_call(Stream* stream, const char* name, F function) {
  auto node = std::make_shared<Node>();
  node->name = name;
  node->data = new F(std::move(function));
  node->run = [](void* data) { (*static_cast<F*>(data))(); };
  node->drop = [](void* data) { delete static_cast<F*>(data); };
  return add(stream, node);
}

void flush_all() {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::recursive_mutex> lock(state);
    all.assign(streams.begin(), streams.end());
  }
  all.push_back(&default_stream);
  for (auto* stream : all) flush(stream);
}

cudaError_t wait_for(Stream* stream, const char* call) {
  {
    std::lock_guard<std::recursive_mutex> lock(state);
    if (stream->capture) {
      stream->capture->broken = true;
      return fail(cudaErrorStreamCaptureUnsupported, call);
    }
  }
  if (auto error = unsafe(call)) return error;
  trace(2, "wait: %s", call);
  flush(stream);
  return faulty ? fail(cudaErrorAssert, call) : cudaSuccess;
}

// ---- kernels ----

std::mutex kernels_mutex;
std::unordered_map<const void*, std::string>& kernels() {
  static auto* map = new std::unordered_map<const void*, std::string>();
  return *map;
}
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

cudaError_t launch(const void* function, cudaStream_t stream, const char* call) {
  std::string name = "unknown kernel";
  {
    std::lock_guard<std::mutex> lock(kernels_mutex);
    auto found = kernels().find(function);
    if (found != kernels().end()) {
      int status;
      char* plain = abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, &status);
      name = status == 0 ? plain : found->second;
      free(plain);
    }
  }
  if (!SKIP_KERNELS) {
    faulty = true;
    fprintf(stderr, "[emu] a compiled kernel has no emulation: %.300s\n", name.c_str());
    return fail(cudaErrorLaunchFailure, call);
  }
  trace(2, "skipped kernel: %s", name.c_str());
  return add_call(at(stream), name.c_str(), [] {});
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))
#define SUCCEEDS(name, ...) \
  API cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#define REFUSED(name, ...) \
  API cudaError_t name(__VA_ARGS__) { return fail(cudaErrorNotSupported, #name); }

// ---- for the operator bridge ----

API int emu_enqueue(void* stream, void (*run)(void*), void (*drop)(void*), void* data,
                    const char* name) {
  auto node = std::make_shared<Node>();
  node->run = run, node->drop = drop, node->data = data, node->name = name;
  return add(at((cudaStream_t)stream), node);
}
API int emu_holds(const void* p) { return device().holds(p) || is_pinned(p); }
API int emu_capturing(void* stream) { return at((cudaStream_t)stream)->capture != nullptr; }
API int emu_idle(void* stream) {
  std::lock_guard<std::recursive_mutex> lock(state);
  auto* s = at((cudaStream_t)stream);
  return s->queue.empty() && !s->running;
}
API void emu_note(int on) {
  std::lock_guard<std::recursive_mutex> lock(state);
  noting = on;
  noted.clear();
}
API const char* emu_noted(size_t i) { return i < noted.size() ? noted[i].c_str() : nullptr; }
API int emu_lazy() { return LAZY; }
API void emu_fault(const char* what) {
  fprintf(stderr, "[emu] failed on the device: %s\n", what);
  faulty = true;
}
API int emu_wait(void* stream, const char* name) { return wait_for(at((cudaStream_t)stream), name); }

// ---- errors ----

#define NAME(error) \
  case error: return #error;
API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    NAME(cudaSuccess) NAME(cudaErrorInvalidValue) NAME(cudaErrorMemoryAllocation)
    NAME(cudaErrorNotReady) NAME(cudaErrorNotSupported) NAME(cudaErrorAssert)
    NAME(cudaErrorLaunchFailure) NAME(cudaErrorStreamCaptureUnsupported)
    NAME(cudaErrorStreamCaptureInvalidated) NAME(cudaErrorStreamCaptureMerge)
    NAME(cudaErrorStreamCaptureUnmatched) NAME(cudaErrorStreamCaptureUnjoined)
    NAME(cudaErrorStreamCaptureIsolation) NAME(cudaErrorStreamCaptureImplicit)
    NAME(cudaErrorCapturedEvent) NAME(cudaErrorInvalidResourceHandle)
    default: return "cudaErrorUnknown";
  }
}
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a "
                                        "capturing stream";
    default: return cudaGetErrorName(error);
  }
}
API cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }

// ---- device ----

API cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
API cudaError_t cudaGetDevice(int* index) { *index = 0; return cudaSuccess; }
API cudaError_t cudaSetDevice(int index) {
  return index == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice, "cudaSetDevice");
}
SUCCEEDS(cudaSetDeviceFlags, unsigned)
SUCCEEDS(cudaInitDevice, int, unsigned, unsigned)
API cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Emulated H100");
  memcpy(p->uuid.bytes, "emulated-device", 16);
  p->totalGlobalMem = TOTAL;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = 9, p->minor = 0;
  p->textureAlignment = 512;
  p->multiProcessorCount = 132;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->streamPrioritiesSupported = p->managedMemory = p->cooperativeLaunch = 1;
  p->canUseHostPointerForRegisteredMem = p->hostRegisterSupported = 1;
  p->memoryPoolsSupported = 1;
  p->clusterLaunch = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: *value = 65535; break;
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* out, int length, int) {
  snprintf(out, length, "0000:01:00.0");
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
SUCCEEDS(cudaDeviceEnablePeerAccess, int, unsigned)
API cudaError_t cudaDeviceSynchronize() {
  if (auto error = unsafe("cudaDeviceSynchronize")) return error;
  trace(2, "wait: cudaDeviceSynchronize");
  flush_all();
  return faulty ? fail(cudaErrorAssert, "cudaDeviceSynchronize") : cudaSuccess;
}
SUCCEEDS(cudaDeviceReset)
SUCCEEDS(cudaProfilerStart)
SUCCEEDS(cudaProfilerStop)

// ---- memory ----

API cudaError_t cudaMalloc(void** out, size_t bytes) {
  if (auto error = unsafe("cudaMalloc")) return error;
  *out = device().in_use + bytes + CONTEXT > TOTAL ? nullptr : device().take(bytes);
  return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation, "cudaMalloc");
}
API cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  if (auto error = unsafe("cudaFree")) return error;
  flush_all();
  return device().give(p) ? cudaSuccess : fail(cudaErrorInvalidValue, "cudaFree");
}
API cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) {
  return cudaMalloc(out, bytes);
}
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
API cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) {
  return cudaMalloc(out, bytes);
}
API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  if (auto error = unsafe("cudaHostAlloc")) return error;
  *out = pinned().take(bytes);
  return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation, "cudaHostAlloc");
}
API cudaError_t cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
API cudaError_t cudaFreeHost(void* p) {
  if (!p) return cudaSuccess;
  if (auto error = unsafe("cudaFreeHost")) return error;
  flush_all();
  return pinned().give(p) ? cudaSuccess : fail(cudaErrorInvalidValue, "cudaFreeHost");
}
API cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  registered[(char*)p] = bytes;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  registered.erase((char*)p);
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** out, void* p, unsigned) {
  if (!is_pinned(p)) return fail(cudaErrorInvalidValue, "cudaHostGetDevicePointer");
  *out = p;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  memset(out, 0, sizeof *out);
  bool on_device = device().holds(p), host = !on_device && is_pinned(p);
  out->type = on_device ? cudaMemoryTypeDevice
              : host    ? cudaMemoryTypeHost
                        : cudaMemoryTypeUnregistered;
  out->device = on_device || host ? 0 : -2;
  out->devicePointer = on_device || host ? (void*)p : nullptr;
  out->hostPointer = on_device ? nullptr : (void*)p;
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = TOTAL, *free_bytes = TOTAL - CONTEXT - device().in_use;
  return cudaSuccess;
}

static cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                        cudaStream_t stream, const char* name) {
  if (!bytes) return cudaSuccess;
  bool from_host = !device().holds(from), to_host = !device().holds(to);
  // Pageable memory is read before the call returns, unless a graph keeps the address.
  Stream* s = at(stream);
  if (LAZY && from_host && !is_pinned(from) && !s->capture) {
    auto staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    return add_call(s, name, [=] { memcpy(to, staged->data(), bytes); });
  }
  auto error = add_call(s, name, [=] { memmove(to, from, bytes); });
  if (!error && LAZY && to_host && !is_pinned(to) && !s->capture) flush(s);
  return error;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, "memcpy");
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (auto error = wait_for(&default_stream, "cudaMemcpy")) return error;
  memmove(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind,
                                  cudaStream_t stream) {
  return add_call(at(stream), "memcpy2D", [=] {
    for (size_t row = 0; row < height; ++row)
      memmove((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  });
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                    cudaStream_t stream) {
  return copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream, "memcpyPeer");
}
API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (auto error = wait_for(&default_stream, "cudaMemset")) return error;
  memset(to, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return add_call(at(stream), "memset", [=] { memset(to, value, bytes); });
}
SUCCEEDS(cudaMemcpyToSymbol, const void*, const void*, size_t, size_t, cudaMemcpyKind)
API cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
  *out = (void*)symbol;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = (cudaMemPool_t)0x10;
  return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *(uint64_t*)value = 0;
  return cudaSuccess;
}
SUCCEEDS(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
SUCCEEDS(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
SUCCEEDS(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
REFUSED(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
REFUSED(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
REFUSED(cudaIpcCloseMemHandle, void*)
REFUSED(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
REFUSED(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)

// ---- streams ----

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  auto* stream = new Stream;
  stream->blocking = !(flags & cudaStreamNonBlocking);
  stream->priority = priority;
  std::lock_guard<std::recursive_mutex> lock(state);
  streams.insert(stream);
  *out = (cudaStream_t)stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) {
  auto* stream = at(s);
  if (stream == &default_stream) return cudaSuccess;
  flush(stream);
  std::lock_guard<std::recursive_mutex> lock(state);
  streams.erase(stream);  // kept in memory: events may still point to it
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
  *priority = at(s)->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned* flags) {
  *flags = at(s)->blocking ? 0 : cudaStreamNonBlocking;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  return wait_for(at(s), "cudaStreamSynchronize");
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
  if (at(s)->capture) {
    at(s)->capture->broken = true;
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  }
  if (auto error = unsafe("cudaStreamQuery")) return error;
  std::lock_guard<std::recursive_mutex> lock(state);
  return at(s)->queue.empty() ? cudaSuccess : fail(cudaErrorNotReady, "cudaStreamQuery");
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  auto* stream = at(s);
  auto* event = reinterpret_cast<Event*>(e);
  std::unique_lock<std::recursive_mutex> lock(state);
  if (event->capture) {
    if (!captures.count(event->capture))  // its capture is over
      return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
    if (stream->capture && stream->capture != event->capture) {
      stream->capture->broken = true;
      return fail(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent");
    }
    if (!stream->capture) {
      stream->capture = event->capture;
      stream->known.clear();
      event->capture->streams.insert(stream);
    }
    for (auto& [other, serial] : event->known)
      stream->known[other] = std::max(stream->known[other], serial);
    return cudaSuccess;
  }
  if (stream->capture) {
    if (!event->record) return cudaSuccess;
    stream->capture->broken = true;
    return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  }
  if (!event->record || event->record->done) return cudaSuccess;
  auto node = std::make_shared<Node>();
  node->name = "wait for event";
  node->wait = event->record;
  lock.unlock();
  return add(stream, node);
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void* data) {
  return add_call(at(s), "host function", [=] { function(data); });
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t function, void* data,
                                      unsigned) {
  if (at(s)->capture) {
    at(s)->capture->broken = true;
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamAddCallback");
  }
  return add_call(at(s), "callback", [=] { function(s, cudaSuccess, data); });
}

// ---- events ----

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  auto* event = new Event;
  event->timing = !(flags & cudaEventDisableTiming);
  *out = (cudaEvent_t)event;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete reinterpret_cast<Event*>(e);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
  auto* event = reinterpret_cast<Event*>(e);
  auto* stream = at(s);
  std::unique_lock<std::recursive_mutex> lock(state);
  if (stream->capture && !(flags & cudaEventRecordExternal)) {
    event->capture = stream->capture;
    event->known = stream->known;
    event->record = nullptr;
    return cudaSuccess;
  }
  event->capture = nullptr;
  event->record = std::make_shared<Record>();
  event->record->stream = stream;
  auto node = std::make_shared<Node>();
  node->name = "record event";
  node->record = event->record;
  lock.unlock();
  return add(stream, node);
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  return cudaEventRecordWithFlags(e, s, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  auto* event = reinterpret_cast<Event*>(e);
  if (event->capture) return fail(cudaErrorCapturedEvent, "cudaEventQuery");
  if (auto error = unsafe("cudaEventQuery")) return error;
  auto record = event->record;
  if (!record || record->done) return cudaSuccess;
  if (record->asked++ == 0) return fail(cudaErrorNotReady, "cudaEventQuery");
  flush(record->stream, record.get());
  return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  auto* event = reinterpret_cast<Event*>(e);
  if (event->capture) return fail(cudaErrorCapturedEvent, "cudaEventSynchronize");
  if (auto error = unsafe("cudaEventSynchronize")) return error;
  trace(2, "wait: cudaEventSynchronize");
  auto record = event->record;
  if (record && !record->done) flush(record->stream, record.get());
  return faulty ? fail(cudaErrorAssert, "cudaEventSynchronize") : cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  auto *first = reinterpret_cast<Event*>(a), *second = reinterpret_cast<Event*>(b);
  if (!first->timing || !second->timing || !first->record || !second->record)
    return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
  if (!first->record->done || !second->record->done)
    return fail(cudaErrorNotReady, "cudaEventElapsedTime");
  *ms = std::chrono::duration<float, std::milli>(second->record->when - first->record->when).count();
  return cudaSuccess;
}

// ---- graphs ----

API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  auto* stream = at(s);
  if (stream == &default_stream)
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  std::lock_guard<std::recursive_mutex> lock(state);
  if (stream->capture) return fail(cudaErrorIllegalState, "cudaStreamBeginCapture");
  auto capture = std::make_shared<Capture>();
  capture->id = next_capture++;
  capture->mode = mode;
  capture->origin = stream;
  capture->thread = pthread_self();
  capture->graph = new Graph;
  capture->graph->nodes = capture->nodes;
  capture->streams.insert(stream);
  stream->capture = capture;
  stream->known.clear();
  captures.insert(capture);
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t, const cudaGraphNode_t*,
                                              const cudaGraphEdgeData*, size_t,
                                              cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(s, mode);
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* out) {
  auto* stream = at(s);
  std::lock_guard<std::recursive_mutex> lock(state);
  auto capture = stream->capture;
  *out = nullptr;
  if (!capture) return fail(cudaErrorIllegalState, "cudaStreamEndCapture");
  if (capture->origin != stream) return fail(cudaErrorStreamCaptureUnmatched, "cudaStreamEndCapture");
  bool joined = true;
  for (auto& [other, serial] : capture->last)
    if (other != stream && stream->known[other] < serial) joined = false;
  for (auto* other : capture->streams) other->capture = nullptr, other->known.clear();
  captures.erase(capture);
  if (capture->broken) return fail(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  if (!joined) return fail(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
  *out = (cudaGraph_t)capture->graph;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  auto* stream = at(s);
  std::lock_guard<std::recursive_mutex> lock(state);
  *status = !stream->capture         ? cudaStreamCaptureStatusNone
            : stream->capture->broken ? cudaStreamCaptureStatusInvalidated
                                      : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** dependencies,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(s, status);
  auto* stream = at(s);
  std::lock_guard<std::recursive_mutex> lock(state);
  if (id) *id = stream->capture ? stream->capture->id : 0;
  if (graph) *graph = stream->capture ? (cudaGraph_t)stream->capture->graph : nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
SUCCEEDS(cudaStreamUpdateCaptureDependencies, cudaStream_t, cudaGraphNode_t*, const
        cudaGraphEdgeData*, size_t, unsigned)
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* nodes, size_t* count) {
  auto& found = *reinterpret_cast<Graph*>(g)->nodes;
  if (nodes)
    for (size_t i = 0; i < std::min(*count, found.size()); ++i)
      nodes[i] = (cudaGraphNode_t)found[i].get();
  *count = found.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t g,
                                              unsigned long long) {
  *out = (cudaGraphExec_t) new std::shared_ptr<Nodes>(reinterpret_cast<Graph*>(g)->nodes);
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t g, unsigned long long f) {
  return cudaGraphInstantiateWithFlags(out, g, f);
}
SUCCEEDS(cudaGraphUpload, cudaGraphExec_t, cudaStream_t)
API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  auto nodes = *reinterpret_cast<std::shared_ptr<Nodes>*>(exec);
  auto* stream = at(s);
  auto error = add_call(stream, "graph", [nodes, stream] {
    for (auto& node : *nodes) run_node(*node, stream);
  });
  std::lock_guard<std::recursive_mutex> lock(state);
  if (noting && !stream->capture)
    for (auto& node : *nodes) noted.push_back("graph: " + node->name);
  return error;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t g) {
  delete reinterpret_cast<Graph*>(g);
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete reinterpret_cast<std::shared_ptr<Nodes>*>(exec);
  return cudaSuccess;
}
SUCCEEDS(cudaGraphDebugDotPrint, cudaGraph_t, const char*, unsigned)
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*,
                                             size_t* count) {
  *count = 0;
  return cudaSuccess;
}
REFUSED(cudaGraphAddNode, cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const
        cudaGraphEdgeData*, size_t, cudaGraphNodeParams*)
REFUSED(cudaGraphConditionalHandleCreate, cudaGraphConditionalHandle*, cudaGraph_t, unsigned,
        unsigned)

// ---- compiled kernels ----

static void* module_handle;
API void** __cudaRegisterFatBinary(void*) { return &module_handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                                uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> lock(kernels_mutex);
  kernels()[function] = name;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API cudaError_t cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                         struct CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared;
  *(cudaStream_t*)stream = last.stream;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t,
                                   cudaStream_t stream) {
  return launch((const void*)kernel, stream, "__cudaLaunchKernel");
}
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t,
                                 cudaStream_t stream) {
  return launch(function, stream, "cudaLaunchKernel");
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launch(function, config->stream, "cudaLaunchKernelExC");
}
API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t,
                                            cudaStream_t stream) {
  return launch(function, stream, "cudaLaunchCooperativeKernel");
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->binaryVersion = out->ptxVersion = 90;
  return cudaSuccess;
}
SUCCEEDS(cudaFuncSetAttribute, const void*, cudaFuncAttribute, int)
SUCCEEDS(cudaKernelSetAttributeForDevice, cudaKernel_t, cudaFuncAttribute, int, int)
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                       size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
REFUSED(cudaLibraryLoadData, cudaLibrary_t*, const void*, cudaJitOption*, void**, unsigned,
        cudaLibraryOption*, void**, unsigned)
REFUSED(cudaLibraryGetKernel, cudaKernel_t*, cudaLibrary_t, const char*)
SUCCEEDS(cudaLibraryUnload, cudaLibrary_t)

static int driver_refuses(...) { return 801; }  // CUDA_ERROR_NOT_SUPPORTED
API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* status) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *out = driver ? dlsym(driver, symbol) : nullptr;
  if (!*out) *out = (void*)driver_refuses;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** out, unsigned long long f,
                                        cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(symbol, out, 13000, f, status);
}
