-- Copies the model's name of a gRPC call to a header, by which Envoy routes the call. Invalid names
-- are left out, because in a header they would break the host's connection or the call.
local EXTRACTED = "envoy.filters.http.grpc_field_extraction"
local HEADER = "x-shadowslice-model"
local LONGEST = 128 -- bytes

function envoy_on_request(handle)
  handle:headers():remove(HEADER)
  local extracted = handle:streamInfo():dynamicMetadata():get(EXTRACTED)
  local name = extracted and extracted["name"] and extracted["name"][1]
  if name and #name <= LONGEST and name:find("^[%w._-]+$") then
    handle:headers():add(HEADER, name)
  end
end
