// A stand-in for the CUDA driver, for tests of what is launched: it answers for one model of GPU, "loads" modules,
// encodes TMA descriptors into a readable form after the checks of the real one, and records launches instead of
// making them. Only what Triton's NVIDIA backend calls is here.

#include "cuda.h"
#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { MAX_FUNCTIONS = 1024, MAX_PARAMS = 96, MAX_BYTES = 3072, MAX_RECORDS = 4096, SNAPSHOT = 32 };

typedef struct {
  uint64_t function, stream;
  uint32_t grid[3], block[3], shared, dependent, count, bytes;
  uint32_t sizes[MAX_PARAMS];
  uint8_t params[MAX_BYTES];
  // What lies at each 8-byte parameter that is a readable address by the caller's account.
  uint8_t snapshots[MAX_PARAMS][SNAPSHOT];
} Record;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t layouts[MAX_FUNCTIONS][MAX_PARAMS + 1];
static uint8_t pointers[MAX_FUNCTIONS][MAX_PARAMS];
static Record records[MAX_RECORDS];
static uint32_t functions, recorded, is_recording;
static uint64_t launched;
static __thread CUcontext context;

// ---- for the tests --------------------------------------------------------------------------------------------------

// Sizes of a function's parameters, and which of them are pointers.
void standin_layout(uint64_t function, uint32_t count, const uint32_t *sizes, const uint8_t *is_pointer) {
  layouts[function][0] = count;
  memcpy(layouts[function] + 1, sizes, count * sizeof(uint32_t));
  memcpy(pointers[function], is_pointer, count);
}

void standin_record(uint32_t on) {
  pthread_mutex_lock(&lock);
  is_recording = on;
  recorded = 0;
  pthread_mutex_unlock(&lock);
}

uint32_t standin_count(void) { return recorded; }
uint64_t standin_launched(void) { return launched; }
uint32_t standin_loaded(void) { return functions; }
const Record *standin_get(uint32_t i) { return &records[i]; }
uint32_t standin_record_size(void) { return sizeof(Record); }

// ---- the driver's functions -----------------------------------------------------------------------------------------

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "error of the stand-in driver";
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *current) { *current = context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext current) { context = current; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
  *made = (CUcontext)(uintptr_t)(device + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  pthread_mutex_lock(&lock);
  *module = (CUmodule)(uintptr_t)(++functions);
  pthread_mutex_unlock(&lock);
  return (uintptr_t)*module < MAX_FUNCTIONS ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                 const cuuint64_t *dims, const cuuint64_t *strides, const int *lower, const int *upper,
                                 cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *element_strides,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

// What lies at an address; not beyond 64 bytes' alignment, because nothing is known of what comes behind.
static void snapshot(uint8_t *to, uint64_t address) {
  memcpy(to, (void *)address, address % 64 > 64 - SNAPSHOT ? 64 - address % 64 : SNAPSHOT);
}

// Address, then (type, rank, swizzle, fill), box as 16-bit, sizes and strides as 64-bit numbers.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  static const uint8_t sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  static const uint32_t widths[] = {256 * 16, 32, 64, 128};
  uint8_t *bytes = (uint8_t *)map;
  if ((uintptr_t)address % 16 || rank < 1 || rank > 5 || type > 12 || swizzle > 3 || (uintptr_t)map % 64)
    return CUDA_ERROR_INVALID_VALUE;
  if (box[0] * sizes[type] % 16 || box[0] * sizes[type] > widths[swizzle])
    return CUDA_ERROR_INVALID_VALUE;
  memset(bytes, 0, sizeof *map);
  memcpy(bytes, &address, 8);
  bytes[8] = type, bytes[9] = rank, bytes[10] = swizzle, bytes[11] = fill;
  for (uint32_t i = 0; i < rank; i++) {
    if (dims[i] == 0 || dims[i] > 1ull << 32 || box[i] == 0 || box[i] > 256 || element_strides[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && (strides[i - 1] % 16 || strides[i - 1] >= 1ull << 40))
      return CUDA_ERROR_INVALID_VALUE;
    uint16_t narrow = box[i];
    memcpy(bytes + 12 + 2 * i, &narrow, 2);
    memcpy(bytes + 24 + 8 * i, &dims[i], 8);
    if (i > 0)
      memcpy(bytes + 64 + 8 * (i - 1), &strides[i - 1], 8);
  }
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  uint64_t number = (uint64_t)function;
  pthread_mutex_lock(&lock);
  launched++;
  if (is_recording && recorded < MAX_RECORDS) {
    Record *to = &records[recorded];
    memset(to, 0, sizeof *to);
    to->function = number;
    to->stream = (uint64_t)config->hStream;
    to->grid[0] = config->gridDimX, to->grid[1] = config->gridDimY, to->grid[2] = config->gridDimZ;
    to->block[0] = config->blockDimX, to->block[1] = config->blockDimY, to->block[2] = config->blockDimZ;
    to->shared = config->sharedMemBytes;
    for (uint32_t i = 0; i < config->numAttrs; i++)
      to->dependent |= config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    to->count = layouts[number][0];
    for (uint32_t i = 0; i < to->count; i++) {
      uint32_t size = layouts[number][1 + i];
      to->sizes[i] = size;
      memcpy(to->params + to->bytes, params[i], size);
      to->bytes += size;
      // Of a descriptor, too: it may have been encoded for an earlier launch.
      uint64_t address = pointers[number][i] || size == sizeof(CUtensorMap) ? *(uint64_t *)params[i] : 0;
      if (address)
        snapshot(to->snapshots[i], address);
    }
    recorded++;
  }
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
