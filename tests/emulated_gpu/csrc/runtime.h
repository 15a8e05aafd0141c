// The emulated runtime's interface for the operator bridge. A stream is a cudaStream_t.
#pragma once

extern "C" {
// Add work to a stream. It runs now, at the next wait (EMU_LAZY=1), or, in a capture, at each replay.
// `drop` frees `data` after the last run. Returns a cudaError_t.
int emu_enqueue(void* stream, void (*run)(void*), void (*drop)(void*), void* data,
                const char* name);
// Whether `stream` is being captured.
int emu_capturing(void* stream);
// Whether work stays in its queue until the host waits for it.
int emu_lazy();
// Whether the queue of `stream` is empty.
int emu_idle(void* stream);
// Wait for `stream`. Returns a cudaError_t; `name` is for the trace.
int emu_wait(void* stream, const char* name);
// Whether an address is in memory of the device, or in pinned memory.
int emu_holds(const void* address);
// Begin to note what streams are given, or end, and forget what was noted.
void emu_note(int on);
// The name of the operation noted as number `i`; nullptr behind the last one.
const char* emu_noted(size_t i);
// Report work that failed. Every later call that waits returns an error.
void emu_fault(const char* what);
}
