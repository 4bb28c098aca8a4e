"""What devices, their drivers and links say of their own faults."""

from headway.recover.known.fragments import ABSENT, Table, xid

HARDWARE: Table = {
    "gpu_nvlink_error": {
        "xid": (xid(74, 144, 145, 146, 147, 148, 149, 150),),
        "cuda": (
            r"uncorrectable nvlink error",
            r"nvlink_?uncorrectable",
            r"nvlink error was detected",
            r"unable to retrieve nvlink",
            r"p2p is disabled between nvlink",
        ),
        "switch": (
            r"failed to (?:bind|allocate|create|map).{0,40}nvlink",
            r"error in the fabric manager",
            r"\bsxid\b.{0,40}[:=]?\s?\(?\d{5}",
            r"nvswitch.{0,60}(?:fatal|error|fail)" + ABSENT,
        ),
        "link": (
            (
                r"nvlink.{0,40}\b(?:fatal|failed|failure|(?:is |went )down|crc error|replay error|recovery error|"
                r"broken)\b"
            )
            + ABSENT,
        ),
        "dcgm": (
            r"(?:errors? (?:detected|occurred)|failure|fault).{0,30}\bnvlink",
            r"nvlink.{0,30}error.{0,20}(?:detected|count|threshold)" + ABSENT,
        ),
        "amd": (r"xgmi.{0,40}(?:error|fail|down)" + ABSENT,),
    },
    "gpu_ecc_uncorrectable": {
        "cuda": (
            r"uncorrectable ecc error",
            r"ecc_?uncorrectable",
            r"ecc_?not_?correctable",
            r"double[- ]bit ecc error" + ABSENT,
        ),
        "xid": (xid(48, 64, 94, 95, 140, 171, 172),),
        "memory": (
            (
                r"(?:uncorrectable|uncontained|unrecovered|contained)\b.{0,20}\b(?:ecc|memory|dram|sram|"
                r"hbm)\b.{0,12}(?:error|fault)s?\b"
            )
            + ABSENT,
        ),
        "count": (
            r"uncorrectable (?:dram|sram|hbm|memory|ecc)?\s?errors? count \W?[1-9]",
            r"(?:dram|sram|hbm) uncorrectable errors?" + ABSENT,
        ),
        "remap": (
            r"row[- ]remap\w*.{0,20}fail\w*" + ABSENT,
            r"failed ?remapped ?rows" + ABSENT,
        ),
        "amd": (
            r"(?<!\b0 )uncorrectable hardware error" + ABSENT,
            r"\b[1-9]\d* uncorrectable errors? detected",
            r"ras.{0,40}uncorrectable error.{0,40}detected",
        ),
        "dcgm": (
            (
                r"(?:double[- ]bit|\bdbe\b|uncorrectable (?:ecc|memory)).{0,40}(?:errors? (?:detected|found|in gpu)|"
                r"page retire|volatile)"
            )
            + ABSENT,
        ),
    },
    "gpu_fell_off_bus": {
        "driver": (
            r"fallen off the bus",
            r"fell off the bus",
        ),
        "xid": (xid(79),),
        "nvml": (
            r"gpu[ _]is[ _]lost",
            r"unable to determine the device handle for gpu.{0,60}(?:unknown error|lost|not found)",
        ),
        "pcie": (r"(?:nvidia|nvrm|amdgpu|gpu).{0,60}(?:lost from (?:the )?(?:pci|bus)|device lost|surprise removal)",),
        "pciback": (
            r"pcieport.{0,80}(?:fatal error|link down|uncorrect\w+ \(fatal\)|surprise down)",
            r"link down.{0,40}pcie.{0,20}gpu",
        ),
    },
    "gpu_gsp_timeout": {
        "xid": (xid(119, 120),),
        "rpc": (
            r"timeout.{0,30}waiting for (?:rpc )?(?:response )?from (?:gpu\d* )?gsp",
            r"_kgsp\w*timed?out",
            r"gsp (?:rpc )?timeout",
            r"gsp.{0,30}rpc.{0,30}(?:timed? ?out|fail)",
        ),
        "gsp": (r"\bgsp\b.{0,40}(?:timed? ?out|crash|not respond|heartbeat|halt|failed|exception|unresponsive|hang)",),
        "send": (r"nvrm.{0,40}(?:rpcsendmessage failed|_gsp:.{0,60}failed|_issuerpc)",),
    },
    "gpu_thermal_power": {
        "xid": (xid(54, 162),),
        "reasons": (
            r"(?:thermal|power brake) slowdown\s*[:=]\s*active",
            r"hw slowdown\s*[:=]\s*active",
        ),
        "violation": (
            r"(?:thermal|power) (?:violation|shutdown|trip|throttl\w*|capp?ing).{0,30}(?:gpu|detect|occur|"
            r"active)",
            r"(?:thermal|power) violations? (?:totaling|of) (?!0 )",
            r"critical temperature reached",
            r"(?:due to|because of) (?:a )?(?:thermal|power) (?:violation|shutdown|throttl\w*|limit|brake)",
        ),
        "hot": (
            r"(?:gpu|device|accelerator|nvidia|hbm|sxm).{0,60}(?:overheat\w*|over-?temp\w*|too hot|"
            r"temperature.{0,30}(?:exceed|critical|too high|above|over the|reached))",
            r"(?:temperature|thermal).{0,60}(?:exceed|critical|above).{0,40}gpu",
        ),
        "slowdown": (
            r"temp_hw_slowdown",
            r"throttle_reason\w*(?:thermal|hw_slowdown|power_brake)",
            r"maximum allowed temperature",
            r"thermal (?:slowdown|throttling)(?!.{0,50}not active).{0,40}(?:gpu|engaged|active|detected)",
            r"gpu.{0,50}thermal(?:ly)? (?:slowdown|throttl|shutdown|event)(?!.{0,40}not active)",
            r"hw_(?:thermal|power_brake)_slowdown",
            r"clocks?_(?:throttle|event)_(?:thermal|power)",
            r"slowdown events?.{0,80}exceed",
        ),
        "power": (
            r"(?:auxiliary|external|12v|pcie).{0,20}power.{0,60}(?:not (?:properly )?connected|missing|"
            r"insufficient|fault|lost)",
            r"gpu.{0,60}(?:power (?:cable|supply|connector|brake|loss)|lacks? power|insufficient power|"
            r"lost power)",
        ),
    },
    "gpu_driver_state": {
        "version": (
            r"driver/library version mismatch",
            r"does not match dso version",
            r"system_driver_mismatch",
            r"unsupported display driver",
            r"kernel module.{0,40}version.{0,40}mismatch",
            r"api mismatch: the client has",
        ),
        "smi": (
            r"nvidia-smi has failed",
            r"couldn't communicate with the nvidia driver",
            r"nvml.{0,40}driver not loaded",
            r"nvml_?error_?driver_?not_?loaded",
        ),
        "nvml": (
            r"failed to initialize nvml",
            r"\bnvml[a-z]\w+(?:\(\))?.{0,20}fail\w*",
            r"can't initialize nvml",
            r"nvml: (?:unknown|driver)",
        ),
        "old": (
            r"driver version is insufficient",
            r"nvidia driver on your system is too old",
            r"insufficient_?driver",
            r"not supported in the installed cuda driver",
        ),
        "none": (
            r"found no nvidia driver",
            r"no nvidia driver",
            r"nvidia driver (?:is )?not (?:loaded|installed|running)",
            r"could not load the nvidia",
            r"cuda driver (?:library|initialization) (?:failed|could not|not found)",
        ),
        "ready": (
            r"system not yet initialized",
            r"system_?not_?ready",
            r"error 802",
            r"fabric ?manager.{0,60}(?:not running|fail|error|not (?:yet )?(?:started|initialized))",
        ),
        "unknown": (
            r"cuda unknown error",
            r"cuda error: unknown error",
            r"cuda_?error_?unknown",
            r"cuda failure.{0,12}unknown error",
            r"\berror 999\b",
            r"cuinit.{0,20}unknown error",
            r"cuinit.{0,40}fail\w*",
            r"cuinit\(.{0,20}(?:err|999)",
        ),
        "init": (
            r"cuda error: initialization error",
            r"cuda_?error_?not_?initialized",
            r"cuda_?error_?initialization",
            r"cuda failure.{0,12}initialization error",
            r"rm_?init_?adapter\w* failed",
            r"rminitadapter: cannot",
            r"no nvidia graphics adapter",
            r"probe routine was not called",
            r"forward compatibility was attempted",
        ),
        "reset": (
            r"gpu (?:requires|needs|is in need of) (?:a )?reset",
            r"gpu.{0,40}reset required",
            r"amdgpu.{0,60}(?:gpu reset|ring \w+ timeout)",
            r"gpu.{0,30}hang detected",
            r"gpu recovery.{0,20}failed",
            r"nv_err_reset_required",
            r"error code unknown error",
        ),
        "container": (r"nvidia-container-cli: (?:initialization|ldcache|mount|detection|driver).{0,10}error",),
        "xid": (xid(8, 38, 46, 56, 57, 58, 61, 62, 109, 110, 122, 123, 124, 125, 126, 143),),
    },
    "gpu_unavailable": {
        "busy": (
            r"devices?(?:\(s\))? (?:is|are|is/are) busy",
            r"devices?_?unavailable",
            r"device is in exclusive",
        ),
        "none": (
            r"no cuda-capable device",
            r"^\s*no (?:cuda|hip|gpu) devices?\b",
            r"no (?:cuda|hip|xpu|rocm) (?:gpus?|devices?)(?: are| is|\(s\))? (?:available|detected|found)",
            r"cuda_?error_?no_?device",
            r"hip_?error_?no_?device",
            r"no (?:gpus?|cuda devices?) (?:were |was )?(?:found|detected|available|visible)",
            r"no supported gpu backend",
            r"no hip gpus",
            r"no gpus? (?:available|on)",
            r"\b(?:there are|found|only|detected|has) (?:0|no) (?:visible |available )?(?:cuda|gpu|hip)s?\b",
        ),
        "smi": (r"^\s*no devices were found",),
        "ordinal": (
            r"invalid device ordinal",
            r"device >= 0 && device < num_gpus",
            r"invalid_?device\b.{0,20}(?:ordinal|cuda)",
            r"cuda_error_invalid_device",
            r"torch\.cuda\.is_available\(\) is false",
            r"could not find (?:any )?(?:cuda|gpu) device",
        ),
        "container": (
            r"could not select device driver.{0,40}gpu",
            r"nvidia-container-cli: device error",
            r"unresolvable cdi devices",
        ),
        "fewer": (
            r"(?:expected|requested|need).{0,30}gpus?.{0,30}(?:but )?(?:only|found|got|"
            r"have) \d+.{0,20}(?:available|visible|found)?",
        ),
    },
    "silent_data_corruption": {
        "named": (
            r"silent data corruption",
            r"sdcreplaymismatch",
            r"(?-i:\bSDC\b).{0,40}(?:detected|mismatch|found|suspect)",
        ),
        "replicas": (
            r"(?:checksum|hash|fingerprint|digest|signature)(?:es|s)?.{0,20}(?:mismatch|differ|"
            r"do(?:es)? not match|diverge).{0,60}(?:ranks?|replicas?|param|gradient|grads?\b|weights?\b|gpu)",
        ),
        "of_rank": (
            r"(?:ranks?|replicas?|param\w*|gradients?|weights?)\b.{0,60}(?:checksum|hash|fingerprint|"
            r"digest)(?:es|s)?\b.{0,20}(?:mismatch|differ|do(?:es)? not match|diverge)",
        ),
        "rerun": (
            r"unexpected result (?!nan|inf).{0,80}\bon rank\b",
            r"(?:transient|persistent) (?:error|fault|result).{0,80}(?:re-?run|rank|gpu|device)",
            r"re-?run.{0,60}(?:transient|persistent) (?:error|fault)",
            r"not reproducible.{0,60}(?:hardware|gpu|faulty)",
        ),
        "bits": (
            r"bit-?wise.{0,20}(?:mismatch|differ\w*|not identical|not equal)",
            r"bit[- ]?flip\w*.{0,30}(?:detect|gpu|found)",
        ),
        "burn": (
            r"gpu \d+: faulty",
            r"out of bounds values\s*:\s*[1-9]\d*\s+failed",
            r"memtest.{0,40}(?:fail|faulty)",
            r"(?:data|memory|compute) corruption (?:was )?(?:detected|found).{0,60}(?:gpu|device|rank)",
        ),
        "replicated": (
            r"(?:replicas?|data.parallel (?:ranks|replicas)|dp (?:ranks|replicas)).{0,60}(?:not identical|"
            r"out of sync|inconsistent|diverged?|different (?:weights|parameters|gradients|loss|values))",
            r"(?:weights|parameters|gradients) (?:are |have )?(?:diverged?|differ|inconsistent|not (?:identical|"
            r"in sync|equal))\b.{0,60}(?:across|between) (?:dp|data.parallel|replicas)",
        ),
    },
    "net_ib_error": {
        "completion": (
            r"net/ib ?:? ?.{0,80}(?:got completion|got async|async(?:hronous)? event|with (?:status|error)|"
            r"fatal|timed? ?out)",
            r"got completion (?:from|with).{0,80}(?:error|status)",
        ),
        "verbs": (
            r"\bibv_\w+.{0,60}(?:fail|error|returned|timed out)",
            r"call to (?:wrap_)?ibv_\w+",
        ),
        "event": (
            r"ibv_(?:wc|event)_\w*(?:err|fatal|down|exc)",
            r"transport retry count(?:er)? exceeded",
            r"retry count(?:er)? exceeded on",
            r"local (?:qp operation|catastrophic|protection) error",
            r"\bvendor err(?:or)? \d",
            r"rnr retry count",
        ),
        "kernel": (
            r"mlx[45]_\w+.{0,100}(?:health|fatal|error|fail|link down|timeout|syndrome|assert)",
            r"mlx[45]_\d+.{0,60}(?:down|error|inactive)",
            r"(?:infiniband|roce|ib\d+|rdma)\b.{0,40}(?:link (?:is )?(?:down|flap\w*)|port (?:is )?down|"
            r"port error|link failure|errors? detected)",
        ),
        "ucx": (
            r"ucx\s+error.{0,160}(?:mlx|rdma|ib_|\brc_|\bud_|transport|endpoint)",
            r"ucp?_\w+.{0,60}endpoint (?:timeout|is not connected)",
            r"ib_(?:iface|md|device)\.c",
        ),
    },
    "net_efa_error": {
        "ofi": (
            r"net/ofi.{0,120}(?:completed with error|fail|error|couldn't|unable|timed? ?out|invalid|"
            r"not supported|unresponsive|unreachable)",
        ),
        "libfabric": (
            r"libfabric.{0,160}(?:error|err:|fail|unreachable|unresponsive|abort)",
            r"\befa_\w+.{0,60}(?:err\b|error|fail)",
            r"fi_(?:cq_readerr|getinfo|send|recv|endpoint|domain|write|read|tsend|trecv)\w*\b.{0,40}(?:fail|"
            r"error|returned -)",
        ),
        "kernel": (
            r"infiniband efa_\d+",
            r"\befa\b.{0,60}(?:failed|unreachable|unresponsive|reset|error|timed? ?out|device.{0,20}not found)",
        ),
        "receiver": (
            r"unresponsive receiver",
            r"\bprov_errno\b",
            r"unresp(?:onsive)? remote",
            r"fi_addr_efa",
            r"unreach_remote",
        ),
    },
}
