/* The part of Triton's C API that the guard uses. The wheel ships no headers; the API is stable across versions. */
#ifndef TRITONE_TRITON_H
#define TRITONE_TRITON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct TRITONSERVER_Error TRITONSERVER_Error;
typedef struct TRITONSERVER_Server TRITONSERVER_Server;
typedef struct TRITONSERVER_ServerOptions TRITONSERVER_ServerOptions;
typedef struct TRITONBACKEND_Backend TRITONBACKEND_Backend;
typedef struct TRITONBACKEND_BackendAttribute TRITONBACKEND_BackendAttribute;
typedef struct TRITONBACKEND_Input TRITONBACKEND_Input;
typedef struct TRITONBACKEND_Model TRITONBACKEND_Model;
typedef struct TRITONBACKEND_ModelInstance TRITONBACKEND_ModelInstance;
typedef struct TRITONBACKEND_Output TRITONBACKEND_Output;
typedef struct TRITONBACKEND_Request TRITONBACKEND_Request;
typedef struct TRITONBACKEND_Response TRITONBACKEND_Response;
typedef struct TRITONBACKEND_ResponseFactory TRITONBACKEND_ResponseFactory;

enum { TYPE_UINT64 = 5, TYPE_INT32 = 8, TYPE_BYTES = 13 };
enum { MEMORY_CPU = 0, MEMORY_GPU = 2 };
enum { ERROR_UNAVAILABLE = 4 };
enum { RESPONSE_FINAL = 1 };
enum { RELEASE_ALL = 1 };

#define EXPORT __attribute__((visibility("default")))

#endif
