/* Copyright 2026 The qarl_jax authors. SPDX-License-Identifier: Apache-2.0
 *
 * NCCL without GPUs, for tests, beside fake_libcuda.c: ranks are threads or processes of this host, joined by
 * (abstract) unix sockets named by the unique id. Non-blocking communicators only, as NCCL's own: calls return at once, a thread of the
 * communicator joins and copies, and a stream (an int in fake_libcuda.c) is busy until a broadcast has been copied or
 * the communicator is aborted. As with the real one, ranks that disagree on a size, and a peer that is merely stuck,
 * are noticed by nobody here.
 *
 * Faults, from the environment: FAKE_NCCL_STALL=rank, which stops half-way through a broadcast, once
 * ($FAKE_CUDA_DIR/stalled-rank says so); FAKE_NCCL_DEAF, a peer that is gone is not noticed; FAKE_NCCL_FLIP=offset of a
 * received byte; FAKE_NCCL_FAIL, joining fails.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7, MOST = 8 };
typedef struct { char internal[128]; } unique_id;
typedef struct { size_t size; unsigned magic, version; int blocking; } config;
struct job { char *at; size_t count; atomic_int *stream; };
struct comm {
  int rank, world, listener, peers[MOST], joined;
  char name[100];
  atomic_int state, aborted, asked; /* asked: a job waits or runs */
  struct job job;
  pthread_t thread;
};

static int pause_ms(struct comm *c, int ms) { usleep(1000 * ms); return atomic_load(&c->aborted); }

/* Moves `size` bytes; 0, or -1 when aborted or (unless deaf) the peer is gone. */
static int move(struct comm *c, int fd, char *at, size_t size, int out) {
  while (size) {
    struct pollfd p = {fd, out ? POLLOUT : POLLIN, 0};
    if (atomic_load(&c->aborted)) return -1;
    if (poll(&p, 1, 5) <= 0) continue;
    ssize_t n = out ? send(fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, at, size, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) {
      if (!getenv("FAKE_NCCL_DEAF")) return -1;
      if (pause_ms(c, 5)) return -1;
      continue;
    }
    at += n, size -= n;
  }
  return 0;
}

static int join(struct comm *c) {
  struct sockaddr_un where = {.sun_family = AF_UNIX};
  memcpy(where.sun_path + 1, c->name, sizeof c->name);
  if (c->rank == 0) {
    c->listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(c->listener, (void *)&where, sizeof where) || listen(c->listener, MOST)) return SYSTEM;
    while (c->joined < c->world - 1) {
      struct pollfd p = {c->listener, POLLIN, 0};
      if (atomic_load(&c->aborted)) return SYSTEM;
      if (poll(&p, 1, 5) <= 0) continue;
      c->peers[c->joined++] = accept(c->listener, 0, 0);
    }
    for (int i = 0; i < c->joined; i++)
      if (send(c->peers[i], "", 1, MSG_NOSIGNAL) != 1) return REMOTE;
    return SUCCESS;
  }
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  c->peers[c->joined++] = fd;
  while (connect(fd, (void *)&where, sizeof where))
    if (pause_ms(c, 2)) return SYSTEM;
  char all_here;
  return move(c, fd, &all_here, 1, 0) ? REMOTE : SUCCESS;
}

static int copy(struct comm *c) {
  const char *stall = getenv("FAKE_NCCL_STALL"), *flip = getenv("FAKE_NCCL_FLIP");
  size_t half = c->job.count / 2;
  for (int part = 0; part < 2; part++) {
    size_t begin = part ? half : 0, size = part ? c->job.count - half : half;
    for (int i = 0; i < c->joined; i++)
      if (move(c, c->peers[i], c->job.at + begin, size, c->rank == 0)) return -1;
    if (!part && stall && atoi(stall) == c->rank) {
      char path[512];
      snprintf(path, sizeof path, "%s/stalled-%d", getenv("FAKE_CUDA_DIR"), c->rank);
      int fd = open(path, O_CREAT | O_EXCL, 0600);
      if (fd < 0) continue;
      close(fd);
      while (!pause_ms(c, 5)) {}
      return -1;
    }
  }
  if (flip && c->rank) c->job.at[strtoull(flip, 0, 10)] ^= 1;
  return 0;
}

static void *work(void *argument) {
  struct comm *c = argument;
  int joined = getenv("FAKE_NCCL_FAIL") ? SYSTEM : join(c);
  atomic_store(&c->state, joined);
  while (joined == SUCCESS && !atomic_load(&c->aborted)) {
    if (!atomic_load(&c->asked)) {
      usleep(200);
      continue;
    }
    atomic_store(&c->state, SUCCESS); /* launched */
    if (copy(c) == 0) atomic_fetch_sub(c->job.stream, 1), atomic_store(&c->asked, 0);
    else {
      atomic_store(&c->state, REMOTE);
      break;
    }
  }
  return 0;
}

int ncclGetVersion(int *out) { *out = 22703; return SUCCESS; }
int ncclGetUniqueId(unique_id *out) {
  static atomic_int serial;
  memset(out, 0, sizeof *out);
  snprintf(out->internal, sizeof out->internal, "nccl-%d-%d", getpid(), atomic_fetch_add(&serial, 1));
  return SUCCESS;
}
int ncclCommInitRankConfig(struct comm **out, int world, unique_id id, int rank, const config *how) {
  if (how->size != 24 || how->magic != 0xcafebeef || how->version != 21400 || how->blocking) return INVALID_ARGUMENT;
  if (rank < 0 || rank >= world || world > MOST) return INVALID_ARGUMENT;
  struct comm *c = *out = calloc(1, sizeof *c);
  c->rank = rank, c->world = world, c->listener = -1;
  memcpy(c->name, id.internal, sizeof c->name);
  atomic_store(&c->state, IN_PROGRESS);
  return pthread_create(&c->thread, 0, work, c) ? SYSTEM : IN_PROGRESS;
}
int ncclCommCuDevice(struct comm *c, int *out) { *out = 0; return c ? SUCCESS : INVALID_ARGUMENT; }
int ncclCommGetAsyncError(struct comm *c, int *out) { *out = atomic_load(&c->state); return SUCCESS; }
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct comm *c, void *stream) {
  if (type != 1 || root != 0 || from != to || !stream) return INVALID_ARGUMENT;
  if (atomic_load(&c->state) != SUCCESS || atomic_load(&c->asked)) return INVALID_USAGE;
  c->job = (struct job){to, count, stream};
  atomic_fetch_add(c->job.stream, 1);
  atomic_store(&c->state, IN_PROGRESS);
  atomic_store(&c->asked, 1);
  return IN_PROGRESS;
}
int ncclCommAbort(struct comm *c) {
  atomic_store(&c->aborted, 1);
  pthread_join(c->thread, 0);
  if (atomic_load(&c->asked)) atomic_fetch_sub(c->job.stream, 1);
  for (int i = 0; i < c->joined; i++) close(c->peers[i]);
  if (c->listener >= 0) close(c->listener);
  free(c);
  return SUCCESS;
}
const char *ncclGetErrorString(int code) {
  return code == REMOTE ? "remote process exited or there was a network error" : code == SYSTEM ? "unhandled system error"
       : code == INVALID_USAGE ? "invalid usage" : "invalid argument";
}
const char *ncclGetLastError(struct comm *c) { return ""; }
