//! Checks NVIDIA's driver and its GPUs.

use crate::doctor::check::Check;
use crate::doctor::facts::{DriverFacts, EngineFacts, ForeignProcess, MIB};
use crate::doctor::requirements::Requirements;
use shadowslice_config::CudaDevice;
use shadowslice_control::nvml::{ComputeMode, Gpu, NvmlHost};

/// The lowest compute capability for which MPS limits the SMs: that of Volta GPUs.
const MIN_CAPABILITY: (i32, i32) = (7, 0);

/// The largest number of other processes on a GPU that are named in a finding.
const MAX_NAMED: usize = 5;

pub(super) fn checks(driver: &DriverFacts, engine: &EngineFacts, need: &Requirements) -> Vec<Check> {
    let host = match &driver.nvml {
        Ok(host) => host,
        // If the driver and its device files are missing, one check reports both.
        Err(problem) if driver.files.is_empty() => return vec![Check::of_problem("driver", problem)],
        Err(problem) => return vec![Check::of_problem("driver", problem), files(driver)],
    };
    let mut checks = vec![
        Check::ok("driver", format!("NVIDIA {}", host.driver)),
        Check::ok("cuda", format!("up to {}", host.cuda)),
    ];
    checks.extend(libcuda(engine));
    checks.push(files(driver));
    checks.extend(gpus(host, driver, need));
    checks
}

fn libcuda(engine: &EngineFacts) -> Option<Check> {
    Some(match &engine.loaded()?.libcuda {
        Ok(()) => Check::ok("libcuda", "libcuda.so.1 can be loaded"),
        Err(why) => Check::fault(
            "libcuda",
            why,
            "install the CUDA part of the driver; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
    })
}

fn files(driver: &DriverFacts) -> Check {
    let name = "device files";
    let closed: Vec<_> = driver.files.iter().filter(|file| !file.open).map(|file| &*file.name).collect();
    let is_there = |name: &str| driver.files.iter().any(|file| file.name == name);
    if !closed.is_empty() {
        return Check::fault(
            name,
            format!("this user cannot read and write {} in /dev", closed.join(", ")),
            "add the user to a group with access, or run as another user; in a container, pass the devices in",
        );
    }
    if !is_there("nvidiactl") {
        return Check::fault(
            name,
            "/dev/nvidiactl is missing",
            "run `nvidia-modprobe`; in a container, pass the devices in",
        );
    }
    if !is_there("nvidia-uvm") {
        return Check::warning(
            name,
            "/dev/nvidia-uvm, which CUDA needs, is missing",
            "run `nvidia-modprobe -u` when the host boots; in a container, pass the device in",
        );
    }
    let names: Vec<_> = driver.files.iter().map(|file| &*file.name).collect();
    Check::ok(name, format!("{} are accessible", names.join(", ")))
}

fn gpus(host: &NvmlHost, driver: &DriverFacts, need: &Requirements) -> Vec<Check> {
    let known = host.gpus.iter().flatten();
    let lost = host.gpus.iter().enumerate().filter_map(|(index, gpu)| Some((index, gpu.as_ref().err()?)));
    let lost = lost.map(|(index, why)| {
        let advice = "look for `Xid` in `dmesg`; reset the GPU or reboot the host";
        Check::fault(format!("gpu {index}"), why, advice)
    });
    let Some(wanted) = need.gpus.as_ref().filter(|wanted| !wanted.is_empty()) else {
        if host.gpus.is_empty() {
            let advice = "check `lspci` and `dmesg`; in a container, pass the GPUs in (`--gpus all`)";
            return vec![Check::fault("gpu", "the driver finds no GPU", advice)];
        }
        return lost.chain(known.flat_map(|gpu| of_gpu(gpu, driver, need))).collect();
    };
    let found = |device: &CudaDevice| known.clone().find(|gpu| gpu.identity.is(device));
    let named = |device: &CudaDevice| match found(device) {
        Some(gpu) => of_gpu(gpu, driver, need),
        None => vec![absent(device, host)],
    };
    wanted.iter().flat_map(named).collect()
}

fn absent(device: &CudaDevice, host: &NvmlHost) -> Check {
    let (name, lost) = match device {
        CudaDevice::Index(index) => {
            let gpu = usize::try_from(*index).ok().and_then(|index| host.gpus.get(index));
            (format!("gpu {index}"), gpu.and_then(|gpu| gpu.as_ref().err()))
        }
        CudaDevice::Uuid(uuid) => (format!("gpu {uuid}"), None),
    };
    let finding = lost.cloned().unwrap_or_else(|| "GPU not found".to_owned());
    Check::fault(name, finding, "use a GPU that `nvidia-smi -L` lists, or check `dmesg` for the reason")
}

fn of_gpu(gpu: &Gpu, driver: &DriverFacts, need: &Requirements) -> Vec<Check> {
    let index = gpu.identity.index;
    vec![
        presence(index, gpu),
        others(index, gpu, driver),
        compute_mode(index, gpu.compute_mode, need.mps),
        mig(index, gpu),
    ]
}

fn presence(index: u32, gpu: &Gpu) -> Check {
    let name = format!("gpu {index}");
    let (free, total) = (gpu.usage.memory.free / MIB, gpu.usage.memory.total / MIB);
    let (major, minor) = gpu.capability;
    let what = format!("{}, {}, {free} of {total} MiB free", gpu.identity.name, gpu.identity.uuid);
    if gpu.capability < MIN_CAPABILITY {
        return Check::fault(
            name,
            format!(
                "{what}; the compute capability is {major}.{minor}, and MPS limits SMs only from 7.0 (Volta) on"
            ),
            "use a newer GPU",
        );
    }
    Check::ok(name, what)
}

fn others(index: u32, gpu: &Gpu, driver: &DriverFacts) -> Check {
    let name = format!("gpu {index} processes");
    let find = |pid: u32| driver.foreign.iter().find(|foreign| foreign.pid == pid);
    let foreign: Vec<_> = gpu
        .usage
        .processes
        .iter()
        .filter_map(|process| {
            let ForeignProcess { pid, name } = find(process.pid)?;
            let memory = process.bytes.map(|bytes| format!(", {} MiB", bytes / MIB)).unwrap_or_default();
            Some(format!("{name} (pid {pid}{memory})"))
        })
        .collect();
    if foreign.is_empty() {
        return Check::ok(name, "no foreign processes");
    }
    let more = foreign.len().saturating_sub(MAX_NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let named = foreign[..foreign.len().min(MAX_NAMED)].join(", ");
    Check::warning(
        name,
        format!("other processes use this GPU: {named}{more}"),
        "they take SMs and memory outside of all shares; stop them, or move them to another GPU",
    )
}

/// Checks a GPU's compute mode. Under MPS, the mode EXCLUSIVE_PROCESS is suitable, because only the
/// MPS server has contexts on the GPU.
fn compute_mode(index: u32, mode: ComputeMode, mps: bool) -> Check {
    let name = format!("gpu {index} compute mode");
    let set = |mode: &str| format!("as root, run `nvidia-smi -i {index} -c {mode}`");
    match (mode, mps) {
        (ComputeMode::ExclusiveProcess, true) => {
            Check::ok(name, "EXCLUSIVE_PROCESS: no process can bypass MPS")
        }
        (ComputeMode::ExclusiveProcess, false) => {
            let finding =
                "EXCLUSIVE_PROCESS: without MPS only one worker can use the GPU, so no shadow can start";
            Check::fault(name, finding, set("DEFAULT"))
        }
        (ComputeMode::Default, true) => {
            let finding =
                "DEFAULT: a process that does not find the MPS daemon runs outside of MPS, on all SMs";
            let advice = format!("{}, unless other programs use this GPU", set("EXCLUSIVE_PROCESS"));
            Check::warning(name, finding, advice)
        }
        (ComputeMode::Default, false) => Check::ok(name, "DEFAULT"),
        (ComputeMode::Prohibited, _) => {
            let fit = if mps { "EXCLUSIVE_PROCESS" } else { "DEFAULT" };
            Check::fault(name, "PROHIBITED: no process can use this GPU", set(fit))
        }
        (ComputeMode::Unknown, _) => {
            Check::warning(name, "unknown", format!("check `nvidia-smi -i {index} -q -d COMPUTE`"))
        }
    }
}

fn mig(index: u32, gpu: &Gpu) -> Check {
    let name = format!("gpu {index} mig");
    if gpu.mig {
        return Check::fault(
            name,
            "on: the GPU is split into MIG instances, which shadowslice does not support",
            format!("as root, run `nvidia-smi -i {index} -mig 0`"),
        );
    }
    Check::ok(name, "off")
}
