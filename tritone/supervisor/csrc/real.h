/* Triton's own functions behind those that this library stands in for, and small helpers over them. */
#ifndef TRITONE_REAL_H
#define TRITONE_REAL_H

#include <dlfcn.h>

#include "triton.h"

/* A function of the real python backend's library. */
void *real_backend(const char *name);

#define NEXT(name, result, ...)                                                \
  static result (*next_##name)(__VA_ARGS__);                                   \
  if (next_##name == NULL) next_##name = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define BACKEND(name, result, ...)                                             \
  static result (*next_##name)(__VA_ARGS__);                                   \
  if (next_##name == NULL) next_##name = (result(*)(__VA_ARGS__))real_backend(#name)

typedef TRITONSERVER_Error *Error;

Error response_new(TRITONBACKEND_Response **r, TRITONBACKEND_Request *q);
Error response_new_from(TRITONBACKEND_Response **r, TRITONBACKEND_ResponseFactory *f);
Error response_send(TRITONBACKEND_Response *r, uint32_t flags, Error error);
Error response_delete(TRITONBACKEND_Response *r);
Error factory_new(TRITONBACKEND_ResponseFactory **f, TRITONBACKEND_Request *q);
Error factory_flags(TRITONBACKEND_ResponseFactory *f, uint32_t flags);
Error factory_delete(TRITONBACKEND_ResponseFactory *f);
void error_delete(Error error);

/* The only element of a BYTES input as text, to be freed, or null. With `number` instead: copies a UINT64 input there. */
char *copy_input(TRITONBACKEND_Request *request, const char *name, void *number);

#endif
