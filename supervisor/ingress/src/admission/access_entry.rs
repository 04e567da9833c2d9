//! The access log's entry of a request. It is in the extensions of the request.

use hyper::HeaderMap;
use shadowslice_datapath::access::AccessEntry;
use tonic::Status;

use super::request_error::RequestError;

/// Records the error that the client receives as its answer.
pub(crate) fn log_error(entry: &AccessEntry, why: &RequestError) {
    entry.journal().record_failure(why.message());
    entry.set_code(why.code() as u16);
}

/// Records how a gRPC call ended, if these headers or trailers contain a status. The headers of a
/// call that is answered by a message contain none.
pub(crate) fn log_grpc_status(entry: &AccessEntry, headers: &HeaderMap) {
    if let Some(status) = Status::from_header_map(headers) {
        if !status.message().is_empty() {
            entry.journal().record_failure(status.message().to_owned());
        }
        entry.set_code(i32::from(status.code()).try_into().unwrap_or_default());
    }
}
