/* The fastest backend that Triton can have. An instance returns its input as its output `y`.
 *
 * The start of an instance takes MINIMAL_LOAD_US (an environment variable, in us), which stands for the
 * load of a real model. All other time of a load is Triton's own. The declarations are those of Triton's
 * tritonbackend.h, which PyPI does not offer. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct Error Error;
typedef struct Input Input;
typedef struct Instance Instance;
typedef struct Output Output;
typedef struct Request Request;
typedef struct Response Response;

extern Error* TRITONBACKEND_InputBuffer(Input*, uint32_t, const void**, uint64_t*, int*, int64_t*);
extern Error* TRITONBACKEND_InputProperties(Input*, const char**, int*, const int64_t**, uint32_t*,
                                            uint64_t*, uint32_t*);
extern Error* TRITONBACKEND_OutputBuffer(Output*, void**, uint64_t, int*, int64_t*);
extern Error* TRITONBACKEND_RequestInputByIndex(Request*, uint32_t, Input**);
extern Error* TRITONBACKEND_RequestRelease(Request*, uint32_t);
extern Error* TRITONBACKEND_ResponseNew(Response**, Request*);
extern Error* TRITONBACKEND_ResponseOutput(Response*, Output**, const char*, int, const int64_t*, uint32_t);
extern Error* TRITONBACKEND_ResponseSend(Response*, uint32_t, Error*);

enum { CPU_MEMORY = 0, FINAL = 1, WHOLE_REQUEST = 1 };

/* The benchmark compares every answer, so an error may end the server. */
static void check(const Error* error) {
  if (error) abort();
}

Error* TRITONBACKEND_ModelInstanceInitialize(Instance* instance) {
  (void)instance;
  const char* load_us = getenv("MINIMAL_LOAD_US");
  long us = load_us ? atol(load_us) : 0;
  struct timespec load = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
  nanosleep(&load, NULL);
  return NULL;
}

static void answer(Request* request) {
  Input* input;
  Output* output;
  Response* response;
  const char* name;
  const int64_t* shape;
  const void* from;
  void* to;
  uint64_t bytes, part;
  uint32_t dims, parts;
  int type, memory = CPU_MEMORY, from_memory = CPU_MEMORY;
  int64_t device = 0;
  check(TRITONBACKEND_RequestInputByIndex(request, 0, &input));
  check(TRITONBACKEND_InputProperties(input, &name, &type, &shape, &dims, &bytes, &parts));
  check(TRITONBACKEND_ResponseNew(&response, request));
  check(TRITONBACKEND_ResponseOutput(response, &output, "y", type, shape, dims));
  check(TRITONBACKEND_OutputBuffer(output, &to, bytes, &memory, &device));
  for (uint32_t index = 0; index < parts; index++, to = (char*)to + part) {
    check(TRITONBACKEND_InputBuffer(input, index, &from, &part, &from_memory, &device));
    memcpy(to, from, part);
  }
  check(TRITONBACKEND_ResponseSend(response, FINAL, NULL));
  check(TRITONBACKEND_RequestRelease(request, WHOLE_REQUEST));
}

Error* TRITONBACKEND_ModelInstanceExecute(Instance* instance, Request** requests, uint32_t count) {
  (void)instance;
  for (uint32_t index = 0; index < count; index++) answer(requests[index]);
  return NULL;
}
