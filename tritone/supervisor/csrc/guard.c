/* Ends the requests of a stage whose process has died; loaded into tritonserver.

   Triton's python backend (24.10) leaves the requests that a decoupled model's process held without an answer for ever
   when that process dies, and so every ensemble request they are part of. This library stands in two places:

   - it is the `libtriton_python.so` that Triton loads, and hands every call on to the real one;
   - it is preloaded, so that it sees which requests have been answered, and answers the server's readiness.

   The supervisor watches the processes and tells, line by line through a pipe in the run directory:
     `dead MODEL`         end what the process held, and answer in its place until the model is loaded again
     `load MODEL PIPE`    load it again; how that went goes into the pipe
     `unready NAME ...`   what is not ready now, instead of what was told before
     `drain`              refuse new requests */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "guard.h"
#include "real.h"

#define BUCKETS 4096
/* What a dead process had put into its queue may come this much later; then the factory's address may be used anew. */
#define KEEP_SECONDS 2.0

typedef struct Made {
  struct Made *next;
  TRITONBACKEND_Response *response;
  Call *call;
} Made;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Instance *instances;
static Call *calls[BUCKETS];
static Made *made[BUCKETS];
static __thread Call *current;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* -- tables; under the lock -- */

static unsigned bucket(const void *pointer) { return (unsigned)((uintptr_t)pointer >> 4) % BUCKETS; }

static Call *find_call(const TRITONBACKEND_ResponseFactory *factory) {
  Call *call = calls[bucket(factory)];
  while (call != NULL && call->factory != factory) call = call->next;
  return call;
}

static void drop_bodies(Call *call) {
  free(call->request_body);
  free(call->handoff);
  free(call->event);
  call->request_body = call->handoff = call->event = NULL;
}

static void free_call(Call *call) {
  drop_bodies(call);
  free(call);
}

static void remove_call(Call *call) {
  Call **at = &calls[bucket(call->factory)];
  while (*at != call) at = &(*at)->next;
  *at = call->next;
  call->factory = NULL;
}

static void remember(TRITONBACKEND_Response *response, Call *call) {
  Made *entry = malloc(sizeof *entry);
  *entry = (Made){made[bucket(response)], response, call};
  made[bucket(response)] = entry;
}

static Call *forget(const TRITONBACKEND_Response *response) {
  for (Made **at = &made[bucket(response)]; *at != NULL; at = &(*at)->next) {
    Made *entry = *at;
    if (entry->response != response) continue;
    Call *call = entry->call;
    *at = entry->next;
    free(entry);
    return call;
  }
  return NULL;
}

/* -- what answers.c sends with; straight to Triton -- */

TRITONBACKEND_Response *new_response(Call *call) {
  TRITONBACKEND_Response *response = NULL;
  Error error = call->factory != NULL ? response_new_from(&response, call->factory) : response_new(&response, call->request);
  error_delete(error);
  return response;
}

void send_response(Call *call, TRITONBACKEND_Response *response, bool last, TRITONSERVER_Error *error) {
  error_delete(response_send(response, last ? RESPONSE_FINAL : 0, error));
  error_delete(error);
  call->sent++;
  if (last) call->finished = true;
}

void send_last_flag(Call *call) {
  TRITONBACKEND_ResponseFactory *factory = call->factory;
  if (factory == NULL) error_delete(factory_new(&factory, call->request));
  if (factory != NULL) error_delete(factory_flags(factory, RESPONSE_FINAL));
  if (factory != NULL && call->factory == NULL) error_delete(factory_delete(factory));
  call->finished = true;
}

/* -- the end of a process -- */

static void end_call(Call *call) {
  for (;;) {
    pthread_mutex_lock(&lock);
    bool busy = call->sending > 0;
    pthread_mutex_unlock(&lock);
    if (!busy) break;
    usleep(200);
  }
  if (!call->finished) answer_call(call);
  pthread_mutex_lock(&lock);
  drop_bodies(call);
  call->forced_at = seconds();
  pthread_mutex_unlock(&lock);
}

void end_model(const char *model) {
  for (;;) {
    Call *found = NULL;
    pthread_mutex_lock(&lock);
    for (Instance *instance = instances; instance != NULL; instance = instance->next) {
      if (strcmp(instance->model, model) == 0) instance->dead = true;
    }
    for (int number = 0; number < BUCKETS && found == NULL; number++) {
      for (Call *call = calls[number]; call != NULL; call = call->next) {
        /* One that executes is answered by its own thread, which Triton wakes after a second. */
        if (!call->instance->dead || call->executing || call->finished || call->forced) continue;
        found = call;
        found->forced = true;
        break;
      }
    }
    pthread_mutex_unlock(&lock);
    if (found == NULL) return;
    end_call(found);
  }
}

/* Deletes the factories of ended calls: they hold the model, which could not be unloaded. */
void sweep(void) {
  for (int number = 0; number < BUCKETS; number++) {
    for (;;) {
      pthread_mutex_lock(&lock);
      Call *call = calls[number];
      while (call != NULL && !(call->forced_at > 0 && seconds() - call->forced_at > KEEP_SECONDS)) call = call->next;
      TRITONBACKEND_ResponseFactory *factory = call == NULL ? NULL : call->factory;
      if (call != NULL) {
        remove_call(call);
        free_call(call);
      }
      pthread_mutex_unlock(&lock);
      if (factory == NULL) break;
      error_delete(factory_delete(factory));
    }
  }
}

/* -- what the real python backend calls -- */

EXPORT TRITONSERVER_Error *TRITONBACKEND_ResponseFactoryNew(TRITONBACKEND_ResponseFactory **factory,
                                                            TRITONBACKEND_Request *request) {
  Error error = factory_new(factory, request);
  if (error == NULL && current != NULL && current->factory == NULL) {
    pthread_mutex_lock(&lock);
    current->factory = *factory;
    current->next = calls[bucket(*factory)];
    calls[bucket(*factory)] = current;
    pthread_mutex_unlock(&lock);
  }
  return error;
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory *factory) {
  pthread_mutex_lock(&lock);
  Call *call = find_call(factory);
  bool ours = call != NULL && call->forced; /* sweep() deletes it */
  if (call != NULL && !ours) {
    remove_call(call);
    if (!call->executing) free_call(call);
  }
  pthread_mutex_unlock(&lock);
  return ours ? NULL : factory_delete(factory);
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory *factory,
                                                                  const uint32_t flags) {
  pthread_mutex_lock(&lock);
  Call *call = find_call(factory);
  if (call != NULL && (call->forced || call->finished)) {
    pthread_mutex_unlock(&lock);
    return NULL;
  }
  if (call != NULL) call->sending++;
  pthread_mutex_unlock(&lock);
  Error error = factory_flags(factory, flags);
  if (call != NULL) {
    pthread_mutex_lock(&lock);
    call->sending--;
    if (flags & RESPONSE_FINAL) {
      call->finished = true;
      drop_bodies(call);
    }
    pthread_mutex_unlock(&lock);
  }
  return error;
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_ResponseNewFromFactory(TRITONBACKEND_Response **response,
                                                                TRITONBACKEND_ResponseFactory *factory) {
  Error error = response_new_from(response, factory);
  if (error == NULL) {
    pthread_mutex_lock(&lock);
    Call *call = find_call(factory);
    if (call != NULL) remember(*response, call);
    pthread_mutex_unlock(&lock);
  }
  return error;
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_ResponseNew(TRITONBACKEND_Response **response, TRITONBACKEND_Request *request) {
  Error error = response_new(response, request);
  if (error == NULL && current != NULL) {
    pthread_mutex_lock(&lock);
    remember(*response, current);
    pthread_mutex_unlock(&lock);
  }
  return error;
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response *response) {
  pthread_mutex_lock(&lock);
  forget(response);
  pthread_mutex_unlock(&lock);
  return response_delete(response);
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_ResponseSend(TRITONBACKEND_Response *response, const uint32_t flags,
                                                      TRITONSERVER_Error *error) {
  pthread_mutex_lock(&lock);
  Call *call = forget(response);
  bool over = call != NULL && (call->forced || call->finished);
  /* The process died while it was handed this very request. */
  bool died = call != NULL && !over && error != NULL && call->executing && call->instance->dead;
  if (died) call->forced = true;
  if (call != NULL && !over && !died) call->sending++;
  pthread_mutex_unlock(&lock);
  if (over || died) {
    /* The caller deletes `error`. */
    error_delete(response_delete(response));
    if (died) end_call(call);
    return NULL;
  }
  Error failure = response_send(response, flags, error);
  if (call != NULL) {
    pthread_mutex_lock(&lock);
    call->sending--;
    call->sent++;
    if (flags & RESPONSE_FINAL) {
      call->finished = true;
      drop_bodies(call);
    }
    pthread_mutex_unlock(&lock);
  }
  return failure;
}

/* -- the backend that Triton loads -- */

EXPORT TRITONSERVER_Error *TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance *handle) {
  BACKEND(TRITONBACKEND_ModelInstanceInitialize, Error, TRITONBACKEND_ModelInstance *);
  NEXT(TRITONBACKEND_ModelInstanceModel, Error, TRITONBACKEND_ModelInstance *, TRITONBACKEND_Model **);
  NEXT(TRITONBACKEND_ModelName, Error, TRITONBACKEND_Model *, const char **);
  Error error = next_TRITONBACKEND_ModelInstanceInitialize(handle);
  if (error != NULL) return error;
  TRITONBACKEND_Model *model = NULL;
  const char *name = "";
  error_delete(next_TRITONBACKEND_ModelInstanceModel(handle, &model));
  if (model != NULL) error_delete(next_TRITONBACKEND_ModelName(model, &name));
  Instance *instance = calloc(1, sizeof *instance);
  instance->handle = handle;
  snprintf(instance->model, sizeof instance->model, "%s", name);
  pthread_mutex_lock(&lock);
  instance->next = instances;
  instances = instance;
  pthread_mutex_unlock(&lock);
  return NULL;
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance *handle) {
  BACKEND(TRITONBACKEND_ModelInstanceFinalize, Error, TRITONBACKEND_ModelInstance *);
  Error error = next_TRITONBACKEND_ModelInstanceFinalize(handle);
  pthread_mutex_lock(&lock);
  for (Instance **at = &instances; *at != NULL; at = &(*at)->next) {
    Instance *instance = *at;
    if (instance->handle != handle) continue;
    *at = instance->next;
    /* Not freed: an ended call may still name it. One is made for each load of a model. */
    break;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance *handle,
                                                              TRITONBACKEND_Request **requests, const uint32_t count) {
  BACKEND(TRITONBACKEND_ModelInstanceExecute, Error, TRITONBACKEND_ModelInstance *, TRITONBACKEND_Request **, const uint32_t);
  NEXT(TRITONBACKEND_RequestRelease, Error, TRITONBACKEND_Request *, uint32_t);
  pthread_mutex_lock(&lock);
  Instance *instance = instances;
  while (instance != NULL && instance->handle != handle) instance = instance->next;
  pthread_mutex_unlock(&lock);
  /* Stages take one request a call. */
  if (instance == NULL || count != 1) return next_TRITONBACKEND_ModelInstanceExecute(handle, requests, count);
  Call *call = calloc(1, sizeof *call);
  call->instance = instance;
  call->request = requests[0];
  call->executing = true;
  copy_input(requests[0], "session", &call->session);
  call->request_body = copy_input(requests[0], "request", NULL);
  call->handoff = copy_input(requests[0], "handoff", NULL);
  call->event = copy_input(requests[0], "event", NULL);
  if (is_draining() && strcmp(instance->model, "preprocess") == 0) {
    TRITONBACKEND_Response *response = new_response(call);
    const char *message = "UNAVAILABLE: the server is stopping and takes no new requests; try another, or again later";
    if (response != NULL) send_response(call, response, true, unavailable(message));
  } else if (instance->dead) {
    answer_call(call);
  }
  if (call->finished) {
    error_delete(next_TRITONBACKEND_RequestRelease(requests[0], RELEASE_ALL));
    free_call(call);
    return NULL;
  }
  current = call;
  Error error = next_TRITONBACKEND_ModelInstanceExecute(handle, requests, count);
  current = NULL;
  pthread_mutex_lock(&lock);
  call->executing = false;
  call->request = NULL;
  bool plain = call->factory == NULL;
  bool end = !plain && instance->dead && !call->finished && !call->forced;
  if (end) call->forced = true;
  pthread_mutex_unlock(&lock);
  if (plain) free_call(call);
  if (end) end_call(call);
  return error;
}
