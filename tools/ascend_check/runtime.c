/* What machine code made from the vendor's IR needs on the CPU: memory copies between views, and a heap that is
 * emptied after every program and filled with NaN before it, so that reading what was never written shows.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  int64_t rank;
  void *descriptor;
} Unranked;

typedef struct {
  char *allocated;
  char *aligned;
  int64_t offset;
  int64_t sizes_and_strides[];
} Descriptor;

static void copy_axis(int64_t axis, int64_t rank, int64_t bytes, const char *from, const int64_t *size,
                      const int64_t *from_stride, char *to, const int64_t *to_stride) {
  if (axis == rank) {
    memcpy(to, from, (size_t)bytes);
    return;
  }
  if (axis == rank - 1 && from_stride[axis] == 1 && to_stride[axis] == 1) {
    memcpy(to, from, (size_t)(bytes * size[axis]));
    return;
  }
  for (int64_t i = 0; i < size[axis]; ++i)
    copy_axis(axis + 1, rank, bytes, from + i * from_stride[axis] * bytes, size, from_stride,
              to + i * to_stride[axis] * bytes, to_stride);
}

void memrefCopy(int64_t bytes, Unranked *from, Unranked *to) {
  Descriptor *s = from->descriptor, *d = to->descriptor;
  copy_axis(0, from->rank, bytes, s->aligned + s->offset * bytes, s->sizes_and_strides,
            s->sizes_and_strides + from->rank, d->aligned + d->offset * bytes, d->sizes_and_strides + from->rank);
}

#define HEAP_BYTES (64u << 20)
void *__real_malloc(size_t bytes);
static char *heap;
static size_t used;

void *__wrap_malloc(size_t bytes) {
  if (!heap) heap = __real_malloc(HEAP_BYTES);
  size_t start = (used + 63) & ~(size_t)63;
  if (!heap || start + bytes > HEAP_BYTES) abort();
  used = start + bytes;
  memset(heap + start, 0xFF, bytes);
  return heap + start;
}

void __wrap_free(void *pointer) { (void)pointer; }

void latentscan_next_program(void) { used = 0; }
