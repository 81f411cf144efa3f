// Who helps with a call's chunks of work: helpers of our own beside the calling thread.
//
// A decode step is some hundred short loops, one after the other. torch's threads (OpenMP, passive as kvyard sets them)
// sleep between two of them and every loop waits until all have come, which costs more than the second core brings; to let
// them spin hurts whoever shares the machine. Ours differ in two ways: a helper looks out for the next loop for a few
// dozen microseconds before it sleeps, and nobody waits for a helper that has not come: its chunks are taken by the others.
// A chunk is done once, by one thread; which one makes no difference to its result.
#pragma once

#include <cstdint>

namespace kvyard {

// As many threads as torch would use on the calling thread.
int64_t num_threads();

// function(context, chunk) for each chunk in [0, chunks), on this thread and its helpers. Returns when all are done.
void run_chunks(int64_t chunks, void (*function)(void* context, int64_t chunk), void* context);

template <class F>
void run_chunks(int64_t chunks, const F& work) {
  run_chunks(
      chunks, [](void* context, int64_t chunk) { (*static_cast<const F*>(context))(chunk); },
      const_cast<void*>(static_cast<const void*>(&work)));
}

// work(begin, end) over [0, size), in so many pieces as equal as can be.
template <class F>
void run_ranges(int64_t size, int64_t pieces, const F& work) {
  run_chunks(pieces, [&](int64_t piece) { work(size * piece / pieces, size * (piece + 1) / pieces); });
}

}  // namespace kvyard
