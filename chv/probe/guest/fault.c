/* Exceptions (Intel SDM 3A chapter 6). The frame is what start.S left, then what the CPU pushed. */
#include "fault.h"
#include "say.h"

struct frame { u64 vector, error, rip, cs, rflags, rsp; };
struct gate { u16 low, selector, type, middle; u32 high, zero; };

extern u8 fault_stubs[], tick_stub[];
extern u32 attempt_call(void (*code)(void));
extern _Noreturn void attempt_return(u32 vector);
extern u64 attempt_rsp;
static struct gate idt[48] __attribute__((aligned(16)));

void faults_init(void) {
    for (u32 i = 0; i < COUNT(idt); i++) {
        u64 at = (u64)(i < 32 ? fault_stubs + 16 * i : tick_stub);
        idt[i] = (struct gate){at, 8, 0x8e00, at >> 16, at >> 32, 0};
    }
    idt[3].type = 0xee00;                        /* ring 3 may say int3 */
    struct { u16 limit; u64 base; } __attribute__((packed)) idtr = {sizeof idt - 1, (u64)idt};
    __asm__ volatile("lidt %0" ::"m"(idtr));
}

u32 attempt(void (*code)(void)) { return attempt_call(code); }

void fault(const struct frame *f, u64 cr2) {
    if (attempt_rsp) attempt_return(f->vector);
    say("fault vector=%lu error=%lx rip=%lx cr2=%lx", f->vector, f->error, f->rip, cr2);
    stop();
}
