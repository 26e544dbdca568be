/* The cancel board (tritone/pools/board.py), made by the first stage that looks for it: the word of a cancelled session
   holds its number; with FAILED beside it the client still listens, for the error. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "guard.h"

#define WORDS (1 << 16)
#define FAILED ((uint64_t)1 << 63)

static volatile uint64_t *board(void) {
  static volatile uint64_t *mapped;
  if (mapped != NULL) return mapped;
  const char *run = getenv("TRITONE_RUN");
  char path[512];
  snprintf(path, sizeof path, "%s/cancelled.board", run == NULL ? "" : run);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return NULL;
  void *words = mmap(NULL, WORDS * sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  /* Two threads may map it: both mappings are good. */
  if (words != MAP_FAILED) mapped = words;
  return mapped;
}

bool is_cancelled(uint64_t session) {
  volatile uint64_t *words = board();
  return words != NULL && (words[session % WORDS] & ~FAILED) == session;
}

void cancel(uint64_t session) {
  volatile uint64_t *words = board();
  if (words != NULL && words[session % WORDS] != session) words[session % WORDS] = session | FAILED;
}
