/* See real.h. */
#define _GNU_SOURCE
#include "real.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "guard.h"

void *real_backend(const char *name) {
  static void *library;
  if (library == NULL) {
    const char *path = getenv("TRITONE_PYTHON_BACKEND");
    library = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
      fprintf(stderr, "tritone guard: %s cannot be loaded: %s\n", path, dlerror());
      abort();
    }
  }
  return dlsym(library, name);
}

Error response_new(TRITONBACKEND_Response **r, TRITONBACKEND_Request *q) {
  NEXT(TRITONBACKEND_ResponseNew, Error, TRITONBACKEND_Response **, TRITONBACKEND_Request *);
  return next_TRITONBACKEND_ResponseNew(r, q);
}
Error response_new_from(TRITONBACKEND_Response **r, TRITONBACKEND_ResponseFactory *f) {
  NEXT(TRITONBACKEND_ResponseNewFromFactory, Error, TRITONBACKEND_Response **, TRITONBACKEND_ResponseFactory *);
  return next_TRITONBACKEND_ResponseNewFromFactory(r, f);
}
Error response_send(TRITONBACKEND_Response *r, uint32_t flags, Error error) {
  NEXT(TRITONBACKEND_ResponseSend, Error, TRITONBACKEND_Response *, const uint32_t, Error);
  return next_TRITONBACKEND_ResponseSend(r, flags, error);
}
Error response_delete(TRITONBACKEND_Response *r) {
  NEXT(TRITONBACKEND_ResponseDelete, Error, TRITONBACKEND_Response *);
  return next_TRITONBACKEND_ResponseDelete(r);
}
Error factory_new(TRITONBACKEND_ResponseFactory **f, TRITONBACKEND_Request *q) {
  NEXT(TRITONBACKEND_ResponseFactoryNew, Error, TRITONBACKEND_ResponseFactory **, TRITONBACKEND_Request *);
  return next_TRITONBACKEND_ResponseFactoryNew(f, q);
}
Error factory_flags(TRITONBACKEND_ResponseFactory *f, uint32_t flags) {
  NEXT(TRITONBACKEND_ResponseFactorySendFlags, Error, TRITONBACKEND_ResponseFactory *, const uint32_t);
  return next_TRITONBACKEND_ResponseFactorySendFlags(f, flags);
}
Error factory_delete(TRITONBACKEND_ResponseFactory *f) {
  NEXT(TRITONBACKEND_ResponseFactoryDelete, Error, TRITONBACKEND_ResponseFactory *);
  return next_TRITONBACKEND_ResponseFactoryDelete(f);
}
void error_delete(Error error) {
  NEXT(TRITONSERVER_ErrorDelete, void, Error);
  if (error != NULL) next_TRITONSERVER_ErrorDelete(error);
}

TRITONSERVER_Error *unavailable(const char *message) {
  NEXT(TRITONSERVER_ErrorNew, Error, int, const char *);
  return next_TRITONSERVER_ErrorNew(ERROR_UNAVAILABLE, message);
}

bool add_output(TRITONBACKEND_Response *response, const char *name, int type, const int64_t *shape, int rank,
                const void *data, uint64_t size) {
  NEXT(TRITONBACKEND_ResponseOutput, Error, TRITONBACKEND_Response *, TRITONBACKEND_Output **, const char *, int,
       const int64_t *, uint32_t);
  NEXT(TRITONBACKEND_OutputBuffer, Error, TRITONBACKEND_Output *, void **, uint64_t, int *, int64_t *);
  TRITONBACKEND_Output *output = NULL;
  Error error = next_TRITONBACKEND_ResponseOutput(response, &output, name, type, shape, (uint32_t)rank);
  void *buffer = NULL;
  int memory = MEMORY_CPU;
  int64_t device = 0;
  if (error == NULL) error = next_TRITONBACKEND_OutputBuffer(output, &buffer, size, &memory, &device);
  bool made_it = error == NULL && (memory != MEMORY_GPU || size == 0);
  error_delete(error);
  if (made_it && size > 0) memcpy(buffer, data, size);
  return made_it;
}

char *copy_input(TRITONBACKEND_Request *request, const char *name, void *number) {
  NEXT(TRITONBACKEND_RequestInput, Error, TRITONBACKEND_Request *, const char *, TRITONBACKEND_Input **);
  NEXT(TRITONBACKEND_InputBuffer, Error, TRITONBACKEND_Input *, const uint32_t, const void **, uint64_t *, int *, int64_t *);
  TRITONBACKEND_Input *input = NULL;
  Error error = next_TRITONBACKEND_RequestInput(request, name, &input);
  const void *data = NULL;
  uint64_t size = 0;
  int memory = MEMORY_CPU;
  int64_t device = 0;
  if (error == NULL) error = next_TRITONBACKEND_InputBuffer(input, 0, &data, &size, &memory, &device);
  bool found = error == NULL && data != NULL && memory != MEMORY_GPU;
  error_delete(error);
  if (!found) return NULL;
  if (number != NULL) {
    if (size == sizeof(uint64_t)) memcpy(number, data, size);
    return NULL;
  }
  if (size < sizeof(uint32_t)) return NULL;
  return strndup((const char *)data + sizeof(uint32_t), size - sizeof(uint32_t));
}

/* -- what the guard only hands on -- */

EXPORT TRITONSERVER_Error *TRITONBACKEND_Initialize(TRITONBACKEND_Backend *backend) {
  BACKEND(TRITONBACKEND_Initialize, Error, TRITONBACKEND_Backend *);
  return next_TRITONBACKEND_Initialize(backend);
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_Finalize(TRITONBACKEND_Backend *backend) {
  BACKEND(TRITONBACKEND_Finalize, Error, TRITONBACKEND_Backend *);
  return next_TRITONBACKEND_Finalize(backend);
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_GetBackendAttribute(TRITONBACKEND_Backend *backend,
                                                             TRITONBACKEND_BackendAttribute *attribute) {
  BACKEND(TRITONBACKEND_GetBackendAttribute, Error, TRITONBACKEND_Backend *, TRITONBACKEND_BackendAttribute *);
  return next_TRITONBACKEND_GetBackendAttribute(backend, attribute);
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model *model) {
  BACKEND(TRITONBACKEND_ModelInitialize, Error, TRITONBACKEND_Model *);
  return next_TRITONBACKEND_ModelInitialize(model);
}

EXPORT TRITONSERVER_Error *TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model *model) {
  BACKEND(TRITONBACKEND_ModelFinalize, Error, TRITONBACKEND_Model *);
  return next_TRITONBACKEND_ModelFinalize(model);
}
