//! The messages of inferences over gRPC.

use std::sync::Arc;

use bytes::Bytes;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::RequestArrival;
use shadowslice_datapath::router::Route;
use shadowslice_datapath::trace::Journal;

use super::frontend::Frontend;
use super::inference::Target;
use crate::admission::{BudgetShare, MemoryPermit, RequestError, one_at_a_time, run_blocking};
use crate::proto::model_infer_response::InferOutputTensor;
use crate::proto::{ModelInferRequest, ModelInferResponse};
use crate::tensors::{InferRequest, MODEL_VERSION, OutputTensor, is_quick, parse_message};

/// A request that has been parsed.
pub(super) struct ParsedMessage {
    pub(super) target: Target,
    pub(super) request: InferRequest,
    /// The place among the requests in flight.
    pub(super) place: BudgetShare,
}

impl ParsedMessage {
    pub(super) async fn parse(
        route: Route,
        request: ModelInferRequest,
        journal: Option<&Journal>,
        permit: &MemoryPermit,
    ) -> Result<Self, RequestError> {
        let target = Target::new(route, request.model_name.clone(), Some(&request.id), journal)?;
        let place = target.admit(permit, journal)?;
        let request = match is_quick(&request) {
            true => parse_message(request),
            false => {
                let parse = move || one_at_a_time(|| parse_message(request));
                run_blocking("reading the tensors", parse).await
            }
        };
        let request = target.count_malformed(request.map_err(RequestError::from))?;
        Ok(Self { target, request, place })
    }
}

/// Runs a request with a single answer.
pub(super) async fn infer(
    front: &Frontend,
    route: Route,
    request: ModelInferRequest,
    peer: &Arc<Peer>,
    arrival: RequestArrival,
    permit: &MemoryPermit,
) -> Result<(ModelInferResponse, Target), RequestError> {
    let ParsedMessage { target, request, place: _place } =
        ParsedMessage::parse(route, request, arrival.journal.as_ref(), permit).await?;
    target.refuse_streams()?;
    let id = request.id.clone();
    let checked = target.check(front, request, peer, permit).await?;
    let outputs = target.infer(checked, arrival, permit).await?;
    Ok((response(target.name.clone(), id, outputs), target))
}

/// Returns the size of the tensors of a response in bytes.
pub(super) fn response_bytes(response: &ModelInferResponse) -> usize {
    response.raw_output_contents.iter().map(Bytes::len).sum()
}

pub(super) fn response(model: String, id: String, outputs: Vec<OutputTensor>) -> ModelInferResponse {
    let mut response = ModelInferResponse {
        model_name: model,
        model_version: MODEL_VERSION.to_owned(),
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
