/*
 * Entry of the probe guest and what C cannot say: the switch to long mode, the exception stubs, the
 * sleep until a timer tick.
 *
 * PVH (Xen's "x86/HVM direct boot ABI"): 32-bit protected mode, paging off, ebx = hvm_start_info;
 * the entry point is named by ELF note 18, XEN_ELFNOTE_PHYS32_ENTRY.
 * No handler here returns by iret: they give up their frame, as not every KVM can emulate iret.
 */
        .section .note.Xen, "a", @note
        .align  4
        .long   4, 8, 18                        /* name size, descriptor size, type */
        .ascii  "Xen\0"
        .quad   _start                          /* QEMU reads 8 bytes, Cloud Hypervisor 4 */

        .section .text.start, "ax"
        .code32
        .globl  _start
_start: cld
        mov     %ebx, %esi
        mov     $pml4, %eax
        mov     %eax, %cr3
        mov     %cr4, %eax
        or      $0x20, %eax                     /* CR4.PAE */
        mov     %eax, %cr4
        mov     $0xc0000080, %ecx               /* EFER.LME */
        rdmsr
        or      $0x100, %eax
        wrmsr
        mov     %cr0, %eax
        or      $0x80000001, %eax               /* CR0.PG, CR0.PE */
        mov     %eax, %cr0
        lgdt    gdt_pointer
        ljmp    $8, $long_mode

        .code64
long_mode:
        mov     $16, %eax
        mov     %eax, %ds
        mov     %eax, %es
        mov     %eax, %ss
        mov     $stack_top, %esp
        mov     $__bss_start, %edi
        mov     $__bss_quads, %ecx
        xor     %eax, %eax
        rep stosq
        mov     %esi, %edi
        call    main
1:      hlt
        jmp     1b

/* One 16-byte stub for each exception; vectors with an error code of their own get no dummy. */
        .globl  fault_stubs, tick_stub, wait_tick, triple_fault
        .align  16
fault_stubs:
        .set    vector, 0
        .rept   32
        .align  16
        .if     (vector != 8) && (vector < 10 || vector > 14) && (vector != 17) && (vector != 21)
        push    $0
        .endif
        push    $vector
        jmp     1f
        .set    vector, vector + 1
        .endr
        .align  16
1:      mov     %rsp, %rdi
        mov     %cr2, %rsi
        and     $-16, %rsp
        call    fault

/* Interrupts are open only at this hlt, so the tick drops its frame instead of returning. */
wait_tick:
        mov     %rsp, idle_rsp
        sti
        hlt
        cli
tick_stub:
        mov     idle_rsp, %rsp
        ret

/* No usable IDT and a page fault: #PF, #DF, shutdown (Intel SDM 3A 6.15, "double fault"). */
triple_fault:
        lidt    no_idt
        movabs  0x7fffffff000, %rax
        hlt

        .data
        .globl  gdt, gdt_tss
        .align  16
gdt:    .quad   0
        .quad   0x00af9a000000ffff              /* 8: kernel code */
        .quad   0x00cf92000000ffff              /* 16: kernel data */
        .quad   0                               /* 24: base of the sysret selectors */
        .quad   0x00cff2000000ffff              /* 32: user data */
        .quad   0x00affa000000ffff              /* 40: user code */
gdt_tss: .quad  0, 0                            /* 48: task state, filled in by instructions.c */
gdt_pointer:
        .word   gdt_pointer - gdt - 1
        .quad   gdt
no_idt: .word   0
        .quad   0
        .bss
        .align  8
idle_rsp: .quad 0

        .section .pagetables, "aw"
        .globl  pml4
        .align  4096
pml4:   .quad   pdpt + 7
        .fill   511, 8, 0
pdpt:   .quad   pd + 7
        .fill   511, 8, 0
pd:     .set    page, 0                         /* the first 16 MiB, 1:1 */
        .rept   8
        .quad   page * 0x200000 + 0x83
        .set    page, page + 1
        .endr
        .fill   504, 8, 0

        .section .dma, "aw", @nobits
        .align  16
        .skip   16384
stack_top:
