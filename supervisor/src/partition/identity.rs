//! Which GPU is meant: from its index, or a part of its UUID, to its UUID.

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

/// Why no GPU could be named.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// NVML.
    #[error(
        "NVML cannot be used, so no NVIDIA driver works here; install it, or name the GPU by its whole UUID"
    )]
    Nvml(#[source] NvmlError),
    /// No such index.
    #[error("there is no GPU {index}; `nvidia-smi -L` lists {count}, counted from 0")]
    NoIndex {
        /// What was asked for.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// No such UUID.
    #[error("{matching} GPUs have a UUID that begins with {name}; `nvidia-smi -L` lists them")]
    NoName {
        /// What was asked for.
        name: String,
        /// How many match.
        matching: usize,
    },
}

/// The length of a whole UUID: `GPU-` and 36 characters.
const WHOLE: usize = 40;

/// The UUID of the GPU with this index, as `nvidia-smi -L` counts.
pub fn uuid_of_index(index: u32) -> Result<String, IdentityError> {
    let uuids = uuids()?;
    let count = u32::try_from(uuids.len()).unwrap_or(u32::MAX);
    let place = usize::try_from(index).unwrap_or(usize::MAX);
    uuids.into_iter().nth(place).ok_or(IdentityError::NoIndex { index, count })
}

/// The UUID that begins with `name`. A whole one is taken as it is where NVML cannot tell.
pub fn uuid_of_name(name: &str) -> Result<String, IdentityError> {
    let uuids = match uuids() {
        Ok(uuids) => uuids,
        Err(_) if name.len() == WHOLE => return Ok(name.to_owned()),
        Err(error) => return Err(error),
    };
    let mut matching: Vec<String> = uuids
        .into_iter()
        .filter(|uuid| uuid.to_ascii_lowercase().starts_with(&name.to_ascii_lowercase()))
        .collect();
    match (matching.pop(), matching.len()) {
        (Some(uuid), 0) => Ok(uuid),
        (one, more) => {
            let matching = usize::from(one.is_some()) + more;
            Err(IdentityError::NoName { name: name.to_owned(), matching })
        }
    }
}

fn uuids() -> Result<Vec<String>, IdentityError> {
    let read = || {
        let nvml = Nvml::init()?;
        (0..nvml.device_count()?)
            .map(|index| nvml.device_by_index(index)?.uuid())
            .collect::<Result<Vec<_>, _>>()
    };
    read().map_err(IdentityError::Nvml)
}
