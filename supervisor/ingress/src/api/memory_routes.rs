//! The endpoints of shared memory in HTTP.

use hyper::StatusCode;
use serde::Deserialize;
use serde_json::json;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::RequestFailure;

use super::answers::{document, empty};
use super::routes::MemoryEndpoint;
use super::unsupported;
use crate::admission::RequestError;
use crate::proto::system_shared_memory_status_response::RegionStatus;
use crate::tensors::{Regions, parse_object};
use crate::transport::HttpAnswer;

#[derive(Deserialize)]
#[serde(expecting = "an object with `key` and `byte_size`")]
struct Register {
    key: String,
    #[serde(default)]
    offset: u64,
    byte_size: u64,
}

pub(super) fn answer(
    regions: &Regions,
    by: &Peer,
    name: String,
    endpoint: MemoryEndpoint,
    body: &[u8],
) -> Result<HttpAnswer, RequestError> {
    match endpoint {
        MemoryEndpoint::Status => return Ok(document(&regions.status(by, &name)?)),
        MemoryEndpoint::Register => {
            let form = "an object with `key` and `byte_size`";
            let Register { key, offset, byte_size } = parse_object(body, form)
                .map_err(|why| RequestFailure::Invalid(format!("failed to parse the request JSON: {why}")))?;
            regions.register(by, RegionStatus { name, key, offset, byte_size })?;
        }
        MemoryEndpoint::Unregister => regions.unregister(by, &name)?,
    }
    Ok(empty(StatusCode::OK))
}

pub(super) fn answer_cuda(name: &str, endpoint: MemoryEndpoint) -> Result<HttpAnswer, RequestError> {
    match endpoint {
        MemoryEndpoint::Status => {
            unsupported::cuda_status(name)?;
            Ok(document(&json!([])))
        }
        MemoryEndpoint::Register => Err(unsupported::register_cuda(name)),
        MemoryEndpoint::Unregister => Ok(empty(StatusCode::OK)),
    }
}
