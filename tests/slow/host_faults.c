// Faults of one host, preloaded into its processes: a wrong clock and a full disk.
// They begin when the files "clock" and "disk" appear in the folder $SPELL_HOST_FAULTS.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int has_fault(const char *name) {
  const char *folder = getenv("SPELL_HOST_FAULTS");
  char path[4096];
  if (!folder) return 0;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  int before = errno, found = access(path, F_OK) == 0;
  errno = before;
  return found;
}

static long offset(void) { return has_fault("clock") ? 3600 : 0; }

int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*next)(clockid_t, struct timespec *);
  if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
  int status = next(id, now);
  if (!status && id == CLOCK_REALTIME) now->tv_sec += offset();
  return status;
}

int gettimeofday(struct timeval *now, void *zone) {
  static int (*next)(struct timeval *, void *);
  if (!next) next = dlsym(RTLD_NEXT, "gettimeofday");
  int status = next(now, zone);
  if (!status) now->tv_sec += offset();
  return status;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}

static int is_full(int file) {
  struct stat about;
  return file > 2 && has_fault("disk") && !fstat(file, &about) && S_ISREG(about.st_mode);
}

#define WRITER(NAME, PARAMETERS, ARGUMENTS)               \
  ssize_t NAME PARAMETERS {                               \
    static ssize_t(*next) PARAMETERS;                     \
    if (!next) next = dlsym(RTLD_NEXT, #NAME);            \
    if (is_full(file)) {                                  \
      errno = ENOSPC;                                     \
      return -1;                                          \
    }                                                     \
    return next ARGUMENTS;                                \
  }

WRITER(write, (int file, const void *data, size_t size), (file, data, size))
WRITER(writev, (int file, const struct iovec *parts, int count), (file, parts, count))
WRITER(pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
WRITER(pwrite64, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
WRITER(pwritev, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
