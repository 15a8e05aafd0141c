// The part of libnvidia-ml.so.1 that vLLM and torch call: one device of compute capability 9.0.

#include <stdlib.h>
#include <string.h>

#define API extern "C" __attribute__((visibility("default")))
enum { OK = 0, NOT_SUPPORTED = 3 };
static unsigned long long total() {
  const char* text = getenv("EMU_MEMORY_GB");
  return (text && *text ? atoll(text) : 80ULL) << 30;
}
API int nvmlInit_v2() { return OK; }
API int nvmlInit() { return OK; }
API int nvmlInitWithFlags(unsigned) { return OK; }
API int nvmlShutdown() { return OK; }
API const char* nvmlErrorString(int) { return "not supported by the emulated device"; }
API int nvmlSystemGetDriverVersion(char* out, unsigned n) { strncpy(out, "580.0", n); return OK; }
API int nvmlSystemGetCudaDriverVersion(int* out) { *out = 13000; return OK; }
API int nvmlSystemGetCudaDriverVersion_v2(int* out) { *out = 13000; return OK; }
API int nvmlDeviceGetCount_v2(unsigned* n) { *n = 1; return OK; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned, void** out) { *out = (void*)1; return OK; }
API int nvmlDeviceGetHandleByUUID(const char*, void** out) { *out = (void*)1; return OK; }
API int nvmlDeviceGetName(void*, char* out, unsigned n) { strncpy(out, "Emulated H100", n); return OK; }
API int nvmlDeviceGetUUID(void*, char* out, unsigned n) { strncpy(out, "GPU-emulated", n); return OK; }
API int nvmlDeviceGetCudaComputeCapability(void*, int* a, int* b) { *a = 9, *b = 0; return OK; }
struct Memory { unsigned long long total, free, used; };
API int nvmlDeviceGetMemoryInfo(void*, Memory* out) {
  out->total = total(), out->free = total(), out->used = 0;
  return OK;
}
API int nvmlDeviceGetNumaNodeId(void*, unsigned*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetTopologyCommonAncestor(void*, void*, int*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetP2PStatus(void*, void*, int, int* out) { *out = 1; return OK; }
API int nvmlDeviceGetIndex(void*, unsigned* out) { *out = 0; return OK; }
