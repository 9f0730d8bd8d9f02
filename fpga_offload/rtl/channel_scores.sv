// SparQ's second step for one job: approximate logits of all tokens of the context from the chosen channels,
// and the keys by which tokens are chosen, the sums of the logits over the query heads.
//
// Channels lie as [d, block_tokens]; 16 tokens of one channel are a beat. Up to eight beats of a block are a
// tile: for each of its channels they go by in eight cycles, the time of a fused multiply-add, whose results
// circulate. Logits are sums in the order of the channels, one rounding each.
`default_nettype none
module channel_scores #(parameter D = 128, parameter G = 1, parameter LN = 16) (
    input  wire            clk,
    input  wire            rst,
    input  wire            start,
    input  wire            bf16,
    input  wire [8:0]      keep,              // channels
    input  wire [31:0]     block_tokens,
    input  wire [31:0]     sinks,
    // blocks, in order: their addresses
    input  wire            block_valid,
    output reg             block_ready,
    input  wire [63:0]     block_address,
    input  wire            blocks_end,        // none comes any more
    // chosen channels
    output wire [7:0]      ask_place,         // for their numbers
    input  wire [7:0]      ask_channel,
    output wire [7:0]      sum_place,         // for their queries
    input  wire [32*G-1:0] reduced,
    output reg             logit_valid,       // of a token, all heads
    output reg  [32*G-1:0] logit,
    output reg             key_valid,
    output reg  [31:0]     key,
    output wire            done,              // level: no key comes any more
    output wire            quiet,
    output reg             arvalid,
    input  wire            arready,
    output reg  [63:0]     araddr,
    output reg  [7:0]      arlen,
    input  wire            rvalid,
    output wire            rready,
    input  wire [255:0]    rdata
);
    localparam DEPTH = 128;

    // Questions: tiles of a block, channels of a tile, bursts of a channel that stay within 4 KiB.
    localparam [2:0] BLOCK = 0, TILE = 1, CHANNEL = 2, PLACE = 3, BURST = 4, END = 5;
    reg [2:0] ask;
    reg [63:0] base;
    reg [31:0] token;
    reg [7:0] number;
    reg [3:0] tile_beats, left;
    reg [58:0] at;
    reg [7:0] credit;
    wire [31:0] tokens_left = block_tokens - token;
    wire [7:0] to_boundary = 8'd128 - {1'b0, at[6:0]};
    wire [3:0] burst = {4'd0, left} < to_boundary ? left : to_boundary[3:0];
    wire ask_now = ask == BURST && (!arvalid || arready) && credit >= {4'd0, burst};
    wire pop;
    // Tiles that are asked for and not summed yet: their beats.
    reg [3:0] tiles [0:15];
    reg [4:0] tiles_in, tiles_out;
    wire [4:0] tiles_waiting = tiles_in - tiles_out;
    assign ask_place = number;
    always @(posedge clk) begin
        block_ready <= 0;
        if (arvalid && arready) arvalid <= 0;
        if (rst) begin
            ask <= END;
            arvalid <= 0;
            credit <= DEPTH;
            tiles_in <= 0;
        end else begin
            credit <= credit - (ask_now ? {4'd0, burst} : 8'd0) + {7'd0, pop};
            case (ask)
                BLOCK: if (block_valid && !block_ready) begin
                    ask <= TILE;
                    block_ready <= 1;
                    base <= block_address;
                    token <= 0;
                end else if (blocks_end && !block_valid) ask <= END;
                TILE: if (token == block_tokens) ask <= BLOCK;
                    else if (tiles_waiting < 15) begin
                        ask <= CHANNEL;
                        number <= 0;
                        tile_beats <= tokens_left >= 128 ? 4'd8 : tokens_left[7:4];
                        tiles[tiles_in[3:0]] <= tokens_left >= 128 ? 4'd8 : tokens_left[7:4];
                        tiles_in <= tiles_in + 5'd1;
                    end
                CHANNEL: ask <= PLACE;        // its number comes
                PLACE: begin
                    ask <= BURST;
                    left <= tile_beats;
                    at <= base[63:5] + {27'd0, token[31:4]} + times(ask_channel, block_tokens[31:4]);
                end
                BURST: if (ask_now) begin
                    arvalid <= 1;
                    araddr <= {at, 5'd0};
                    arlen <= {4'd0, burst} - 8'd1;
                    at <= at + {55'd0, burst};
                    left <= left - burst;
                    if (left == burst) begin
                        number <= number + 8'd1;
                        ask <= CHANNEL;
                        if ({1'b0, number} + 9'd1 == keep) begin
                            ask <= TILE;
                            token <= token + {24'd0, tile_beats, 4'd0};
                        end
                    end
                end
                default: if (start) begin
                    ask <= BLOCK;
                    tiles_in <= 0;
                end
            endcase
        end
    end
    function automatic [58:0] times(input [7:0] x, input [27:0] factor);
        integer i;
        begin
            times = 0;
            for (i = 0; i < 8; i = i + 1) if (x[i]) times = times + ({31'd0, factor} << i);
        end
    endfunction

    // Answers wait here.
    reg [255:0] memory [0:DEPTH-1];
    reg [7:0] written, read;
    wire [7:0] waiting = written - read;
    wire [255:0] front = memory[read[6:0]];
    assign rready = 1'b1;
    assign quiet = credit == DEPTH && !arvalid && ask == END;
    always @(posedge clk) begin
        if (rst) begin
            written <= 0;
            read <= 0;
        end else begin
            if (rvalid) written <= written + 8'd1;
            if (pop) read <= read + 8'd1;
        end
        if (rvalid) memory[written[6:0]] <= rdata;
    end

    // A channel of a tile goes by in a turn of eight cycles, once all of it waits.
    reg [2:0] phase;
    reg [7:0] channel;
    reg turn;                                 // this turn has a channel
    reg full, filling;                        // the logits that wait to be added up; those on their way
    wire [3:0] now_beats = tiles[tiles_out[3:0]];
    wire last_channel = {1'b0, channel} + 9'd1 == keep;
    wire begin_turn = phase == 7 && tiles_waiting != 0 && waiting >= {4'd0, now_beats} + {7'd0, pop}
        && !(last_channel && (full || filling));
    assign sum_place = channel;
    reg [3:0] turn_beats;
    reg turn_first, turn_last;
    assign pop = turn && {1'b0, phase} < turn_beats;
    always @(posedge clk) begin
        phase <= phase + 3'd1;
        if (rst || start) begin
            phase <= 0;
            channel <= 0;
            turn <= 0;
            tiles_out <= 0;
        end else if (phase == 7) begin
            turn <= begin_turn;
            if (begin_turn) begin
                turn_beats <= now_beats;
                turn_first <= channel == 0;
                turn_last <= last_channel;
                channel <= last_channel ? 8'd0 : channel + 8'd1;
                if (last_channel) tiles_out <= tiles_out + 5'd1;
            end
        end
    end
    // The queries of the turn's channel, which has been asked for since the turn before.
    reg [32*G-1:0] turn_query;
    always @(posedge clk) if (phase == 7) turn_query <= reduced;

    wire [19*16-1:0] wide;
    reg [19*16-1:0] operand;
    reg beat_valid, beat_first, beat_last;
    genvar i, g;
    generate for (i = 0; i < 16; i = i + 1) begin : convert
        stored_to_wide one(.bf16(bf16), .x(front[16*i +: 16]), .y(wide[19*i +: 19]));
    end endgenerate
    always @(posedge clk) begin
        operand <= wide;
        beat_valid <= pop && !rst;
        beat_first <= turn_first;
        beat_last <= turn_last;
    end
    reg [7:0] last_beats;                     // those of a last channel in the multiply-add
    always @(posedge clk) last_beats <= rst || start ? 8'd0 : {last_beats[6:0], beat_valid && beat_last};
    wire logits_valid = last_beats[7];

    // Logits of a tile: eight beats of 16 tokens, all heads.
    reg [512*G-1:0] logits [0:7];
    wire [512*G-1:0] results;
    generate for (g = 0; g < G; g = g + 1) begin : head
        reg [31:0] query;
        always @(posedge clk) query <= turn_query[32*g +: 32];
        for (i = 0; i < 16; i = i + 1) begin : lane
            multiply_add one(.clk(clk), .rst(rst), .query(query), .x(beat_valid ? operand[19*i +: 19] : 19'd0),
                .first(beat_valid && beat_first), .y(results[512*g + 32*i +: 32]));
        end
    end endgenerate
    reg [3:0] filled, tile_size;
    reg [3:0] drain_beat, drain_lane;
    wire drain = full;
    wire drained = drain && drain_lane == 15 && drain_beat + 4'd1 == tile_size;
    always @(posedge clk) begin
        if (rst || start) begin
            full <= 0;
            filling <= 0;
            filled <= 0;
            drain_beat <= 0;
            drain_lane <= 0;
        end else begin
            if (begin_turn && last_channel) begin
                filling <= 1;
                tile_size <= now_beats;
            end
            if (logits_valid) begin
                filled <= filled + 4'd1;
                if (filled + 4'd1 == tile_size) begin
                    full <= 1;
                    filling <= 0;
                    filled <= 0;
                end
            end
            if (drain) begin
                drain_lane <= drain_lane + 4'd1;
                if (drain_lane == 15) drain_beat <= drain_beat + 4'd1;
                if (drained) begin
                    full <= 0;
                    drain_beat <= 0;
                end
            end
        end
        if (logits_valid) logits[filled[2:0]] <= results;
    end

    // Sums over the heads, in their order.
    wire [512*G-1:0] drain_row = logits[drain_beat[2:0]];
    wire [32*G-1:0] sums;
    wire [G-1:0] sums_valid;
    integer k;
    always @(posedge clk) begin
        logit_valid <= drain && !rst && !start;
        for (k = 0; k < G; k = k + 1) logit[32*k +: 32] <= drain_row[512*k + 32*drain_lane +: 32];
    end
    assign sums[31:0] = logit[31:0];
    assign sums_valid[0] = logit_valid;
    generate for (g = 1; g < G; g = g + 1) begin : add
        // The head's logits wait for the sum of those before it.
        reg [32*7*g-1:0] delayed;
        always @(posedge clk) delayed <= {delayed[32*7*g-33:0], logit[32*g +: 32]};
        wire [31:0] addend = g == 1 ? logit[32*g +: 32] : delayed[32*7*(g-1)-1 -: 32];
        add_single one(.clk(clk), .rst(rst || start), .in_valid(sums_valid[g-1]), .a(sums[32*(g-1) +: 32]),
            .b(addend), .out_valid(sums_valid[g]), .y(sums[32*g +: 32]));
    end endgenerate
    wire [31:0] score = sums[32*(G-1) +: 32];
    wire [31:0] bits = score == 32'h80000000 ? 32'd0 : score;
    reg [31:0] scored;
    reg [7:0] behind;                         // cycles in which nothing was on its way
    wire busy = ask != END || waiting != 0 || turn || tiles_waiting != 0 || full || filling || beat_valid
        || logit_valid || sums_valid != 0 || last_beats != 0;
    assign done = behind == 8'd96;            // longer than the way from a beat to its key
    always @(posedge clk) begin
        key_valid <= sums_valid[G-1] && !rst && !start;
        key <= scored < sinks ? 32'hffffffff : bits[31] ? ~bits : {1'b1, bits[30:0]};
        if (rst || start) begin
            scored <= 0;
            behind <= 0;
        end else begin
            if (sums_valid[G-1]) scored <= scored + 1;
            behind <= busy || credit != DEPTH ? 8'd0 : done ? behind : behind + 8'd1;
        end
    end
endmodule

// query * x + the result of eight cycles ago, or + 0. One rounding; latency 8.
module multiply_add (
    input  wire        clk,
    input  wire        rst,
    input  wire [31:0] query,
    input  wire [18:0] x,
    input  wire        first,
    output wire [31:0] y
); /*verilator no_inline_module*/
    wire unused;
    zkf_fma #(.WEXP(8), .WMAN(24), .STAGE_PRODUCT(1), .STAGE_NORMALIZE(1), .STAGE_OUTPUT(1), .LATENCY(8)) fused(
        .clk(clk), .rst(rst), .in_valid(1'b1), .a(query), .b({x, 13'd0}), .c(first ? 32'd0 : y), .out_valid(unused),
        .y(y));
endmodule
`default_nettype wire
