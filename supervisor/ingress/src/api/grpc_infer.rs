//! The messages of inferences over gRPC.

use bytes::Bytes;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::{Metadata, RequestArrival};
use shadowslice_datapath::router::Route;

use super::frontend::Frontend;
use super::inference::{CheckedRequest, Target};
use crate::admission::{MemoryPermit, RequestError, one_at_a_time, run_blocking};
use crate::proto::model_infer_response::InferOutputTensor;
use crate::proto::{ModelInferRequest, ModelInferResponse};
use crate::tensors::{OutputTensor, is_quick, parse_message};

/// Parses and checks a request. Returns its model, too.
pub(super) async fn receive(
    front: &Frontend,
    route: Route,
    request: ModelInferRequest,
    peer: &Peer,
    arrival: &RequestArrival,
    permit: &MemoryPermit,
) -> Result<(Target, CheckedRequest), RequestError> {
    let journal = arrival.journal.as_ref();
    let target = Target::new(route, request.model_name.clone(), Some(&request.id), journal)?;
    let parse = async {
        let request = match is_quick(&request) {
            true => parse_message(request),
            false => {
                let parse = move || one_at_a_time(|| parse_message(request));
                run_blocking("reading the tensors", parse).await
            }
        };
        Ok(request?)
    };
    let checked = target.receive(front, peer, arrival, permit, parse).await?;
    Ok((target, checked))
}

/// Runs a request with a single answer.
pub(super) async fn infer(
    front: &Frontend,
    route: Route,
    request: ModelInferRequest,
    peer: &Peer,
    arrival: RequestArrival,
    permit: &MemoryPermit,
) -> Result<(ModelInferResponse, Target), RequestError> {
    let (target, checked) = receive(front, route, request, peer, &arrival, permit).await?;
    let answer = target.infer(checked, arrival, permit).await?;
    Ok((response(&target.metadata, answer.id, answer.outputs), target))
}

/// Returns the size of the tensors of a response in bytes.
pub(super) fn response_bytes(response: &ModelInferResponse) -> usize {
    response.raw_output_contents.iter().map(Bytes::len).sum()
}

pub(super) fn response(model: &Metadata, id: String, outputs: Vec<OutputTensor>) -> ModelInferResponse {
    let mut response = ModelInferResponse {
        model_name: model.name.clone(),
        model_version: model.version.clone(),
        id,
        ..Default::default()
    };
    for output in outputs {
        response.outputs.push(InferOutputTensor {
            name: output.name,
            datatype: output.datatype.name().to_owned(),
            shape: output.shape,
            ..Default::default()
        });
        response.raw_output_contents.push(output.data);
    }
    response
}
