//! HTTP's paths of shared memory.

use hyper::StatusCode;
use serde::Deserialize;
use serde_json::json;

use crate::admission::request_error::RequestError;
use crate::api::http::{Answer, document, empty};
use crate::api::routes::OfMemory;
use crate::api::unsupported;
use crate::proto::system_shared_memory_status_response::RegionStatus;
use crate::tensors::object;
use crate::tensors::shared_memory::Regions;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::RequestFailure;

#[derive(Deserialize)]
#[serde(expecting = "an object with `key` and `byte_size`")]
struct Register {
    key: String,
    #[serde(default)]
    offset: u64,
    byte_size: u64,
}

pub(crate) fn answer(
    regions: &Regions,
    by: &Peer,
    name: String,
    what: OfMemory,
    body: &[u8],
) -> Result<Answer, RequestError> {
    match what {
        OfMemory::Status => return Ok(document(&regions.status(by, &name)?)),
        OfMemory::Register => {
            let form = "an object with `key` and `byte_size`";
            let Register { key, offset, byte_size } = object::body(body, form)
                .map_err(|why| RequestFailure::Invalid(format!("failed to parse the request JSON: {why}")))?;
            regions.register(by, RegionStatus { name, key, offset, byte_size })?;
        }
        OfMemory::Unregister if name.is_empty() => regions.unregister_all(by)?,
        OfMemory::Unregister => regions.unregister(by, &name)?,
    }
    Ok(empty(StatusCode::OK))
}

pub(crate) fn answer_cuda(name: &str, what: OfMemory) -> Result<Answer, RequestError> {
    match what {
        OfMemory::Status => {
            unsupported::cuda_status(name)?;
            Ok(document(&json!([])))
        }
        OfMemory::Register => Err(unsupported::register_cuda(name)),
        OfMemory::Unregister => Ok(empty(StatusCode::OK)),
    }
}
