/* Copyright 2026 The qarl_jax authors. SPDX-License-Identifier: Apache-2.0
 *
 * A CUDA driver without a GPU, for tests: device memory is a file in $FAKE_CUDA_DIR, mapped; a handle is its name; a
 * stream is the number of things it is busy with (fake_libnccl.c). One device, one context; its UUID ends with
 * $FAKE_CUDA_GPU. Wrong use (a freed or unknown pointer, no current context) fails as the real one does.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef uint64_t ptr;
typedef struct { char reserved[64]; } handle_t;
struct region { ptr at; size_t size; int mine; char name[64]; };
static struct region regions[64];
static int context;
static __thread int depth;
static atomic_int serial, streams[64], made;
static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER;
enum { OK = 0, NOT_READY = 600, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };

static struct region *find(ptr p, size_t size) {
  for (int i = 0; i < 64; i++)
    if (regions[i].at && p >= regions[i].at && p + size <= regions[i].at + regions[i].size) return &regions[i];
  return 0;
}
static void path_of(const char *name, char *out) { snprintf(out, 512, "%s/%s", getenv("FAKE_CUDA_DIR"), name); }
static int map(const char *name, int create, size_t size, ptr *out) {
  char path[512];
  path_of(name, path);
  int fd = open(path, create ? O_RDWR | O_CREAT : O_RDWR, 0600);
  if (fd < 0) return INVALID_HANDLE;
  if (create && ftruncate(fd, size)) { close(fd); return OUT_OF_MEMORY; }
  struct stat found;
  fstat(fd, &found);
  void *at = mmap(0, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return OUT_OF_MEMORY;
  pthread_mutex_lock(&table);
  for (int i = 0; i < 64; i++)
    if (!regions[i].at) {
      regions[i].at = (ptr)at, regions[i].size = found.st_size, regions[i].mine = create;
      snprintf(regions[i].name, 64, "%s", name);
      *out = (ptr)at;
      pthread_mutex_unlock(&table);
      return OK;
    }
  pthread_mutex_unlock(&table);
  return OUT_OF_MEMORY;
}
#define CONTEXT if (!depth) return INVALID_CONTEXT

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
int cuGetErrorName(int code, const char **out) {
  *out = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE"
       : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_INVALID_VALUE";
  return OK;
}
int cuDeviceGetCount(int *out) {
  char *given = getenv("FAKE_CUDA_GPUS");
  *out = given ? atoi(given) : 1;
  return *out > 0 ? OK : 100;
}
int cuDeviceGet(int *out, int ordinal) { *out = 7; return ordinal ? 101 : OK; }
int cuDeviceGetUuid_v2(char *out, int device) {
  memcpy(out, "GPU\0of-the-tests", 16);
  if (getenv("FAKE_CUDA_GPU")) out[15] = *getenv("FAKE_CUDA_GPU");
  return device == 7 ? OK : 101;
}
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = &context; return device == 7 ? OK : 101; }
int cuCtxPushCurrent_v2(void *pushed) { if (pushed != &context) return INVALID_CONTEXT; depth++; return OK; }
int cuCtxPopCurrent_v2(void **out) { CONTEXT; *out = &context; depth--; return OK; }
static int is_stream(void *stream) { return (atomic_int *)stream >= streams && (atomic_int *)stream < streams + 64; }
int cuStreamCreate(void **out, unsigned flags) {
  CONTEXT;
  *out = &streams[atomic_fetch_add(&made, 1) % 64];
  return flags == 1 ? OK : INVALID_VALUE;
}
int cuStreamQuery(void *stream) {
  CONTEXT;
  return !is_stream(stream) ? INVALID_HANDLE : atomic_load((atomic_int *)stream) ? NOT_READY : OK;
}
int cuStreamDestroy_v2(void *stream) { return cuStreamQuery(stream); }
int cuStreamSynchronize(void *stream) { return cuStreamQuery(stream); } /* what makes one busy is never waited for so */
int cuMemAlloc_v2(ptr *out, size_t size) {
  CONTEXT;
  const char *limit = getenv("FAKE_CUDA_BYTES");
  if (limit && size > strtoull(limit, 0, 10)) return OUT_OF_MEMORY;
  char name[64];
  snprintf(name, 64, "memory-%d-%d", getpid(), serial++);
  return map(name, 1, size, out);
}
int cuMemFree_v2(ptr p) {
  CONTEXT;
  struct region *r = find(p, 1);
  if (!r || r->at != p || !r->mine) return INVALID_VALUE;
  char path[512];
  path_of(r->name, path);
  unlink(path);
  munmap((void *)r->at, r->size);
  r->at = 0;
  return OK;
}
int cuMemsetD8Async(ptr p, unsigned char value, size_t size, void *stream) {
  CONTEXT;
  if (!find(p, size)) return INVALID_VALUE;
  memset((void *)p, value, size);
  return is_stream(stream) ? OK : INVALID_HANDLE;
}
/* The source may be an array of the host's: JAX's on a CPU. */
int cuMemcpyDtoDAsync_v2(ptr to, ptr from, size_t size, void *stream) {
  CONTEXT;
  if (!find(to, size)) return INVALID_VALUE;
  memcpy((void *)to, (void *)from, size);
  return is_stream(stream) ? OK : INVALID_HANDLE;
}
int cuMemcpyHtoDAsync_v2(ptr to, const void *from, size_t size, void *stream) {
  return cuMemcpyDtoDAsync_v2(to, (ptr)from, size, stream);
}
int cuMemGetAddressRange_v2(ptr *base, size_t *size, ptr p) {
  CONTEXT;
  struct region *r = find(p, 1);
  if (!r) return INVALID_VALUE;
  *base = r->at, *size = r->size;
  return OK;
}
int cuMemGetInfo_v2(size_t *free_, size_t *total) { CONTEXT; *free_ = 3, *total = 4; return OK; }
int cuIpcGetMemHandle(handle_t *out, ptr p) {
  CONTEXT;
  struct region *r = find(p, 1);
  if (!r || !r->mine) return INVALID_VALUE;
  memset(out, 0, sizeof *out);
  memcpy(out->reserved, r->name, strlen(r->name));
  return OK;
}
int cuIpcOpenMemHandle_v2(ptr *out, handle_t handle, unsigned flags) {
  CONTEXT;
  handle.reserved[63] = 0;
  return flags == 1 ? map(handle.reserved, 0, 0, out) : INVALID_VALUE;
}
int cuIpcCloseMemHandle(ptr p) {
  CONTEXT;
  struct region *r = find(p, 1);
  if (!r || r->at != p || r->mine) return INVALID_VALUE;
  munmap((void *)r->at, r->size);
  r->at = 0;
  return OK;
}
