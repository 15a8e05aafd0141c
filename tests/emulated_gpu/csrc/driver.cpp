// The part of libcuda.so.1 that torch, vLLM and Triton call: one device, no modules.

#include <dlfcn.h>
#include <string.h>

#define API extern "C" __attribute__((visibility("default")))
enum { OK = 0, NOT_SUPPORTED = 801 };
extern "C" int cudaDeviceGetAttribute(int*, int, int) __attribute__((weak));
extern "C" int cudaMemGetInfo(size_t*, size_t*) __attribute__((weak));

static int refuse(...) { return NOT_SUPPORTED; }

API int cuInit(unsigned) { return OK; }
API int cuDriverGetVersion(int* version) { *version = 13000; return OK; }
API int cuDeviceGetCount(int* count) { *count = 1; return OK; }
API int cuDeviceGet(int* device, int) { *device = 0; return OK; }
API int cuDeviceGetName(char* name, int length, int) { strncpy(name, "Emulated H100", length); return OK; }
API int cuDeviceGetUuid(void* uuid, int) { memcpy(uuid, "emulated-device", 16); return OK; }
API int cuDeviceGetUuid_v2(void* uuid, int d) { return cuDeviceGetUuid(uuid, d); }
// Attributes have the same numbers in the runtime.
API int cuDeviceGetAttribute(int* value, int which, int device) {
  *value = 0;
  return cudaDeviceGetAttribute ? cudaDeviceGetAttribute(value, which, device) : OK;
}
API int cuDeviceTotalMem_v2(size_t* bytes, int) {
  size_t left;
  return cudaMemGetInfo ? cudaMemGetInfo(&left, bytes) : NOT_SUPPORTED;
}
API int cuMemGetInfo_v2(size_t* left, size_t* bytes) {
  return cudaMemGetInfo ? cudaMemGetInfo(left, bytes) : NOT_SUPPORTED;
}
API int cuDeviceComputeCapability(int* major, int* minor, int) { *major = 9, *minor = 0; return OK; }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { *flags = 0, *active = 1; return OK; }
API int cuDevicePrimaryCtxRetain(void** context, int) { *context = (void*)1; return OK; }
API int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API int cuCtxGetCurrent(void** context) { *context = (void*)1; return OK; }
API int cuCtxSetCurrent(void*) { return OK; }
API int cuCtxPushCurrent_v2(void*) { return OK; }
API int cuCtxPopCurrent_v2(void** context) { *context = (void*)1; return OK; }
API int cuCtxGetDevice(int* device) { *device = 0; return OK; }
API int cuGetErrorString(int, const char** text) { *text = "refused by the emulated driver"; return OK; }
API int cuGetErrorName(int, const char** text) { *text = "CUDA_ERROR_NOT_SUPPORTED"; return OK; }
API int cuPointerGetAttribute(void*, int, unsigned long long) { return NOT_SUPPORTED; }
#define REFUSED(name) \
  API int name(...) { return NOT_SUPPORTED; }
REFUSED(cuCtxGetLimit) REFUSED(cuCtxSetLimit) REFUSED(cuFuncGetAttribute) REFUSED(cuFuncSetAttribute) REFUSED(cuFuncSetCacheConfig)
REFUSED(cuLaunchCooperativeKernel) REFUSED(cuLaunchKernel) REFUSED(cuLaunchKernelEx)
REFUSED(cuLinkAddData_v2) REFUSED(cuLinkComplete) REFUSED(cuLinkCreate_v2)
REFUSED(cuMemAddressFree) REFUSED(cuMemAddressReserve) REFUSED(cuMemCreate)
REFUSED(cuMemGetAllocationGranularity) REFUSED(cuMemMap) REFUSED(cuMemRelease)
REFUSED(cuMemSetAccess) REFUSED(cuMemUnmap) REFUSED(cuModuleGetFunction) REFUSED(cuModuleLoad)
REFUSED(cuModuleLoadData) REFUSED(cuModuleLoadDataEx) REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor) REFUSED(cuTensorMapEncodeTiled)

static int entry(const char* symbol, void** out, int* status) {
  *out = dlsym(RTLD_DEFAULT, symbol);
  if (!*out) *out = (void*)refuse;
  if (status) *status = 0;
  return OK;
}
API int cuGetProcAddress_v2(const char* symbol, void** out, int, unsigned long long, int* status) {
  return entry(symbol, out, status);
}
API int cuGetProcAddress(const char* symbol, void** out, int, unsigned long long) {
  return entry(symbol, out, nullptr);
}
