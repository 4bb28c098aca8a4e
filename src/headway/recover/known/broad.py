"""Messages that often wrap a more specific one, and crashes."""

from headway.recover.known.fragments import Table, xid

BROAD: Table = {
    "gpu_ecc_uncorrectable": {
        "remapped": (xid(63, 92),),
    },
    "compile_error": {
        "dynamo": (
            r"torch\._dynamo\.exc\.",
            r"torch\._dynamo\.(?!.{0,10}utils.{0,40}warn)\w+error",
            r"backendcompilerfailed",
            r"torchruntimeerror",
            r"internaltorchdynamoerror",
            r"dynamo failed to run",
            r"torch\._inductor\.(?:exc|codecache)\.\w*(?:error|exception|fail)",
            r"inductorerror",
            r"loweringexception",
            r"cppcompileerror",
            r"c\+\+ compile error",
            r"unsupported: (?:call_|torch|dynamic|data dependent)",
            r"guardondatadependent",
            r"constraintviolation",
            r"novalidchoiceserror",
            r"invalidcxxcompiler",
            r"subprocexception",
            r"failed running call_",
        ),
        "triton": (
            r"triton\.(?:compiler|runtime)\.\S*(?:error|outofresources)",
            r"triton.{0,60}(?:compilationerror|compil\w+ (?:error|fail)|codegen error|outofresources|"
            r"installation not found)",
            r"compilationerror: at \d+",
            r"out of resource: (?:shared memory|registers?|tensor memory)",
            r"passmanager::run failed",
            r"failed to compile (?:the )?(?:kernel|triton|graph|module|model)",
            r"ptxas.{0,60}(?:error|fatal|fail)",
            r"ptxaserror",
            r"llvm error",
            r"mlir.{0,40}(?:error|fail)",
            r"cannot find a working triton",
            r"failed to find c compiler",
            r"error: .{0,60}tt\.\w+",
        ),
        "build": (
            r"error building extension",
            r"ninja: build stopped",
            r"error compiling objects",
            r"nvcc fatal",
            r"nvcc.{0,60}(?:error|fail)",
            r"command .{0,200}(?:gcc|g\+\+|nvcc|ninja|clang|c\+\+|cc)\b.{0,200}(?:failed with exit|"
            r"returned non-zero)",
            r"fatal error: .{0,80}no such file or directory",
            r"collect2: error",
            r"/ld: cannot find",
            r"cannot find -l",
            r"compilation terminated",
            r"error: .{0,20}was not declared in this scope",
            r"unsupported gpu architecture",
            r"nvrtc.{0,40}(?:error|fail)",
            r"nvrtc: error",
            r"jit.{0,20}compil\w*.{0,30}(?:fail|error)",
            r"cuda_home environment variable is not set",
            r"xla.{0,30}compilation (?:fail|error)",
            r"compilation (?:failure|failed|error)",
            r"failed to build (?:extension|kernel)",
            r"tvm_ffi.{0,40}compil",
        ),
    },
    "import_error": {
        "module": (
            r"\bmodulenotfounderror\b",
            r"\bimporterror\b",
            r"no module named",
            r"cannot import name",
            r"packagenotfounderror",
            r"distributionnotfound",
            r"failed to import",
        ),
        "library": (
            r"undefined symbol",
            r"cannot open shared object",
            r"glibc(?:xx)?_[\d.]+'? not found",
            r"symbol lookup error",
            r"version `?\S{1,40}' not found",
            r"dll load failed",
            r"image not found",
            r"error (?:while )?loading shared librar\w+",
            r"failed to load.{0,60}\.so\b",
            r"could not load (?:dynamic )?library",
            r"oserror: .{0,200}\.so[.\d]*: ",
            r"requires the .{0,60}library but it was not found",
            r"is not installed\. (?:please )?(?:install|run)",
        ),
    },
    "storage_io": {
        "os": (r"(?:^|[\s.:])(?:oserror|ioerror)\w*: \[errno (?!(?:1|2|7|8|9|13|17|18|20|21|22|27|36|39|40)\])\d+\]",),
    },
    "cuda_illegal_access": {
        "other": (
            r"cuda error: (?!(?:invalid argument|invalid config|no kernel|invalid resource|out of memory))",
            r"hip error: (?!invalid arg)",
            r"acceleratorerror",
            r"cuda failure (?:\d+ )?'(?!out of memory|invalid)",
            r"cuda driver error: (?!invalid)",
        ),
    },
    "remote_service_transient": {
        "timeout": (
            r"(?:^|[\s.:])(?:timeouterror|socket\.timeout|timeoutexception|asyncio\.\w*\.?timeouterror)\b",
            r"^timeouterror$",
        ),
    },
}


PROGRAM: Table = {
    "cancelled": {
        "interrupt": (
            r"^keyboardinterrupt",
            r"keyboardinterrupt$",
            r"(?:detected|received|caught|got) (?:a )?keyboard ?interrupt",
            r"got signal: 2\b",
            r"(?:receiv|caught)\w* (?:sigint|signal 2|signal: 2)\b",
            r"sigint (?:receiv|caught)",
            r"received 2 death signal",
            r"closing signal sigint",
        ),
    },
    "segfault": {
        "python": (
            r"fatal python error: segmentation fault",
            r"segfault encountered",
            r"caught signal 11",
            r"received signal 11",
            r"segfault at [0-9a-f]+",
            r"address not mapped to object",
            r"signal: segmentation fault",
            r"segmentation violation",
        ),
    },
    "sigbus": {
        "python": (
            r"fatal python error: bus error",
            r"caught signal 7",
            r"signal: bus error",
            r"received signal 7",
            r"nonexistent physical address",
        ),
    },
    "sigabrt": {
        "heap": (
            r"free\(\): invalid",
            r"malloc\(\): ",
            r"malloc: ",
            r"double free or corruption",
            r"corrupted (?:size|double-linked|unsorted)",
            r"munmap_chunk\(\)",
            r"invalid (?:pointer|next size)",
            r"stack smashing detected",
            r"buffer overflow detected",
            r"realloc\(\): ",
            r"heap corruption",
            r"pure virtual method called",
            r"malloc_consolidate",
        ),
    },
}
