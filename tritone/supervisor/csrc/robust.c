/* Locks that a stage's process held when it died.

   Triton's python backend shares robust mutexes with each stage's process. When one dies inside a lock, the next to lock it
   gets EOWNERDEAD; boost makes an exception of it, which nothing in tritonserver catches: the whole server would end with
   the stage. Here the lock is taken over instead. What it protects may be half changed, but belongs to the dead process's
   own shared memory, of which nothing is used any more: its requests are ended and the stage is loaded with a new one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "triton.h"

/* Only a mutex that was made robust ever gives EOWNERDEAD. */
static int take_over(int result, pthread_mutex_t *mutex) {
  return result == EOWNERDEAD ? pthread_mutex_consistent(mutex) : result;
}

/* glibc keeps an older, incompatible condition variable under the same names, which plain dlsym may find: the version of
   x86-64, then that of 64-bit Arm, then whatever there is. */
static void *find(const char *name) {
  void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
  if (found == NULL) found = dlvsym(RTLD_NEXT, name, "GLIBC_2.17");
  return found != NULL ? found : dlsym(RTLD_NEXT, name);
}

#define LIBC(name, ...)                           \
  static int (*next)(__VA_ARGS__);                \
  if (next == NULL) next = (int (*)(__VA_ARGS__))find(#name)

EXPORT int pthread_mutex_lock(pthread_mutex_t *mutex) {
  LIBC(pthread_mutex_lock, pthread_mutex_t *);
  return take_over(next(mutex), mutex);
}

EXPORT int pthread_mutex_trylock(pthread_mutex_t *mutex) {
  LIBC(pthread_mutex_trylock, pthread_mutex_t *);
  return take_over(next(mutex), mutex);
}

EXPORT int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
  LIBC(pthread_mutex_timedlock, pthread_mutex_t *, const struct timespec *);
  return take_over(next(mutex, until), mutex);
}

EXPORT int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
  LIBC(pthread_cond_wait, pthread_cond_t *, pthread_mutex_t *);
  return take_over(next(condition, mutex), mutex);
}

EXPORT int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
  LIBC(pthread_cond_timedwait, pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  return take_over(next(condition, mutex, until), mutex);
}
